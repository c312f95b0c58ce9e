"""The engine: requests in, outputs out, one step at a time.

Adds to the loop (`quire.engine.loop.step_loop`) what a program wants to see: prompts and parameters
on the way in, texts and log-probabilities by token on the way out. Owns the life of per-request
logits processors. Synchronous, and for one thread at a
time: `LLM` drives it through `quire.engine.loop.sharing`, `AsyncLLM` from a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from quire.core.adapters import Adapter
from quire.core.params import LogitsProcessor, SamplingParams
from quire.core.scheduler.look_ahead import LookAhead
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.prerequisites import Prerequisite
from quire.core.scheduler.scheduler import Progress
from quire.engine.front.digest import Digest
from quire.engine.front.output_processor import OutputProcessor
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import ParsedPrompt, Prompt, parse_prompt
from quire.engine.front.requests import PreparedRequest
from quire.engine.front.served_model import ServedModel
from quire.engine.loop.step_loop import StepLoop, loop_of
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.step_costs import StepCostFile
from quire.errors import EngineError, InvalidParameterError
from quire.executor.interface import Executor
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.front.metrics import Metric

_NESTED = (
    "this engine is computing a step, which called this function (from a logits processor, "
    "say) and cannot end before it "
    "returns: generate with another engine, or after the step"
)


class Engine(ServedModel, StepLoop):
    """One model, served. Build it with `quire.engine.assembly.builder.build_engine`."""

    def __init__(
        self,
        plan: EnginePlan,
        executor: Executor,
        *,
        tokenizer: Tokenizer | None = None,
        generation_config: Mapping[str, Any] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        model_config: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        prerequisites: Iterable[Callable[[], Prerequisite]] = (),
        pace: StepPace | None = None,
        cost_file: StepCostFile | None = None,
        look_ahead: Callable[[], LookAhead] | None = None,
        digest_key: bytes | None = None,
    ) -> None:
        StepLoop.__init__(
            self,
            plan.limits,
            executor,
            clock,
            loop_of(plan),
            prerequisites=prerequisites,
            pace=pace,
            cost_file=cost_file,
            look_ahead=look_ahead,
            digest_key=digest_key,
        )
        ServedModel.__init__(
            self,
            plan,
            tokenizer=tokenizer,
            generation_config=generation_config,
            eos_token_ids=eos_token_ids,
            model_config=model_config,
            clock=clock,
        )
        self._outputs = OutputProcessor(tokenizer, self)
        self._processors: dict[str, list[str]] = {}
        self._in_processors: set[int] = set()
        """Threads that are inside a logits processor now."""
        self._lost: list[RequestOutput] = []

    # -- requests
    # ----------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | Digest,
        *,
        adapter: Adapter | None = None,
        priority: int = 0,
    ) -> None:
        """Accept a request, to be answered with an adapter where one is given. Raises a
        RequestError, and changes nothing, if it cannot be served."""
        self.require_open()
        parsed = parse_prompt(prompt, self.tokenizer, self.plan.spec.vocab_size, self.images)
        if isinstance(params, SamplingParams):
            self._add_sampling(request_id, parsed, self.digest(params), adapter, priority)
        elif isinstance(params, Digest):
            self._add_sampling(request_id, parsed, params, adapter, priority)
        else:
            raise InvalidParameterError(
                f"the parameters are of type {type(params).__name__}; give SamplingParams or "
                "BeamSearchParams",
                param="sampling_params",
            )

    def add(self, prepared: PreparedRequest) -> None:
        """Accept a request that was prepared elsewhere.
        Raises InvalidParameterError for an id that is in use."""
        self.require_open()
        with self._changing():
            self._outputs.add(self.scheduler.add(prepared.spec), prepared)

    def reset_prefix_cache(self, *, preempts: bool = False) -> bool:
        """Forget the cached KV of finished requests; whether nothing that is still in use could be
        found again.

        With `preempts`, running requests give up their blocks, too, and are computed again: the
        same answers. Raises EngineError where the engine is closed.
        """
        self.require_open()
        with self._changing():
            if preempts and self.scheduler.has_work:
                self.loop.forget()
                self.rewind()
            self.scheduler.reset_prefix_cache()
        return not self.scheduler.running

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once; returns what there is of it.
        Unknown and finished ids are ignored."""
        with self._changing():
            request = self.scheduler.abort(request_id)
            self._forget_processors(request_id)
            output = self._outputs.forget(request_id)
            if request is not None:
                request.release()
        return output

    # -- the loop
    # ----------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> Collection[str]:
        """Ids of the requests in flight."""
        return self.scheduler.requests

    def metrics(self) -> list[Metric]:
        """Return the engine's counters, under the names that vLLM gives them."""
        from quire.engine.front.metrics import snapshot

        return snapshot(self.scheduler, self.plan.config.model)

    def refuse_nested_call(self) -> None:
        """Raises EngineError where this thread is inside a logits
        processor of a step of this engine."""
        if threading.get_ident() in self._in_processors:
            raise self.nested_call()

    @staticmethod
    def nested_call() -> EngineError:
        """Return what a call from inside a step is answered with."""
        return EngineError(_NESTED)

    def take_lost(self) -> list[RequestOutput]:
        """Return the last outputs of the requests that an interrupted step has ended;
        they are given once."""
        lost, self._lost = self._lost, []
        return lost

    def step(self) -> list[RequestOutput]:
        """Run one step; returns an output for every request that something happened to, in the kind
        that it wants.

        Never raises for a bug or a broken executor: each affected request gets an output with an
        error.
        """
        with self._changing():
            return self._deliver(self.advance())

    def _end_interrupted(self) -> None:
        """The requests' last outputs are those of `take_lost`."""
        super()._end_interrupted()
        self._lost += self._outputs.end_all()
        for request_id in list(self._processors):
            self._forget_processors(request_id)

    def _deliver(self, progress: list[Progress]) -> list[RequestOutput]:
        outputs = self._outputs.process(progress)
        for sequence, token_id, _ in progress:
            request_id = sequence.request.request_id
            if token_id is None and sequence.request.is_finished:
                self._forget_processors(request_id)
                sequence.request.release()
        return outputs

    def close(self) -> None:
        """End everything and free the memory. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            for request_id in list(self.scheduler.requests):
                self.abort(request_id)
            StepLoop.close(self)
            self.close_model()

    # -- building requests
    # -------------------------------------------------------------------------------------------

    def _add_sampling(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        digest: Digest,
        adapter: Adapter | None,
        priority: int,
    ) -> None:
        names: list[str] = []
        try:
            for processor in digest.params.logits_processors or ():
                names.append(self.executor.register_processor(self._noted(processor)))
            prepared = self.request_builder.sampling(
                request_id,
                prompt,
                digest,
                processors=tuple(names),
                adapter=adapter,
                priority=priority,
            )
            self.add(prepared)
        except BaseException:
            for name in names:
                self.executor.unregister_processor(name)
            raise
        self._processors[request_id] = names

    def _noted(self, processor: LogitsProcessor) -> LogitsProcessor:
        """Return a processor during whose calls `refuse_nested_call` refuses."""

        @wraps(processor)
        def call(*args: Any) -> Any:
            me = threading.get_ident()
            self._in_processors.add(me)
            try:
                return processor(*args)
            finally:
                self._in_processors.discard(me)

        call.__name__ = getattr(processor, "__name__", type(processor).__name__)
        return call

    def _forget_processors(self, request_id: str) -> None:
        for name in self._processors.pop(request_id, ()):
            self.executor.unregister_processor(name)
