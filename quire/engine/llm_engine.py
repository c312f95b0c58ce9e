"""`LLMEngine`: requests in, steps, outputs out, by hand. What `LLM` does in a loop,
for programs that bring their own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quire.common.residence import (
    check_level,
    check_parts,
    check_requests,
    check_rpc,
    check_source,
    check_version,
)
from quire.config.engine import EngineConfig
from quire.core import checks
from quire.core.beam_params import BeamSearchParams
from quire.core.params import SamplingParams
from quire.engine.assembly.builder import build_engine
from quire.engine.front.absent import BoundToProcess, absent
from quire.engine.front.model_view import ModelView
from quire.engine.front.prompts import Prompt, with_truncation
from quire.engine.loop.engine import Engine
from quire.engine.loop.sharing import Output, Session, SharedEngine
from quire.errors import EngineError
from quire.lora.request import LoRARequest

if TYPE_CHECKING:
    from torch import Tensor

    from quire.engine.arg_utils import EngineArgs
    from quire.engine.front.metrics import Metric
    from quire.text.pretrained import PretrainedTokenizer


class LLMEngine(BoundToProcess):
    """One model in this process. Safe to use from several threads; an output is given to one of
    them.

    `options` are the fields of `EngineConfig`; an unknown one raises ConfigError with what it may
    have meant.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_options(model, options)
        self.engine: Engine = build_engine(self.config)
        """The engine itself, for one thread at a time:
        not to be used beside this object in another thread."""
        self.shared = SharedEngine(self.engine)
        self._session = Session(self.shared)
        self._tokenizer: PretrainedTokenizer | None = None
        self._num_updates = 0

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: object = None, **ignored: object
    ) -> Self:
        """Return an engine of parsed arguments."""
        return cls(**engine_args.options())

    @property
    def model_config(self) -> ModelView:
        """The model's limits, and what its `config.json` says."""
        return self.engine.model

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Accept a request; returns its id. Raises a RequestError, and changes nothing,
        if it cannot be served."""
        params = with_truncation(params, tokenization_kwargs)
        adapter = self.engine.adapters.chosen(lora_request)
        return self._session.add(
            prompt, params, request_id=request_id, adapter=adapter, priority=priority
        )

    def step(self) -> list[Output]:
        """Run one step; returns an output for every request that made progress,
        of the kind that it wants."""
        return self._session.step()

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests at once; unknown and finished ids are ignored."""
        for each in checks.request_ids(request_id):
            self._session.abort(each)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything to do or to tell."""
        return self._session.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        """Return requests whose last output has not been given out."""
        return self._session.num_unfinished

    def get_tokenizer(self) -> PretrainedTokenizer:
        """Return the model's tokenizer, with the methods that transformers' have;
        ConfigError with `skip_tokenizer_init`."""
        if self._tokenizer is None:
            self._tokenizer = self.engine.pretrained_tokenizer()
        return self._tokenizer

    @property
    def tokenizer(self) -> PretrainedTokenizer:
        """The same."""
        return self.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters, under the names that vLLM gives them."""
        return self.engine.metrics()

    def do_log_stats(self) -> None:
        """Does nothing: counters are read with `get_metrics`."""

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget the cached KV of finished requests; with `reset_running_requests` that of running
        ones, too, which are computed again. Returns whether nothing that was cached is left.
        """
        with self.shared.held() as engine:
            return engine.reset_prefix_cache(preempts=reset_running_requests)

    def close(self) -> None:
        """End all requests and free the model's memory. Idempotent."""
        with self.shared.held() as engine:
            engine.close()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back to the system until `wake_up`: the weights
        kept in a file (1), or discarded and loaded again from the model's folder (2). Requests that
        have begun go on then with the same tokens; until then, `step` raises EngineError.

        Raises NotAvailableError where this engine cannot, EngineError where the file cannot be
        written; it goes on as before.
        """
        level = check_level(level)
        with self.shared.held() as engine:
            engine.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring back what the tags name, "weights" or "kv_cache"; by default both. Raises a
        QuireError where weights cannot be read, and sleeps on."""
        parts = check_parts(tags)
        with self.shared.held() as engine:
            engine.wake_up(parts)

    def update_weights(
        self,
        source: str | Path | Mapping[str, Tensor],
        *,
        version: str | None = None,
        requests: str = "resume",
    ) -> str:
        """Compute with other weights of the same model from the next step on, those of a folder or
        tensors by a checkpoint's names, and return the version's name: by default, how many updates
        there were. They are loaded beside those in memory; given tensors must not change meanwhile.

        Requests that run go on with the new weights ("resume"), their KV computed anew, or are
        finished before by this call ("finish"). Nothing that was cached is found again. Raises a
        QuireError where the weights cannot be taken; then nothing has changed.
        """
        waits = check_requests(requests)
        name = check_version(version, self._num_updates + 1)
        loaded = self.engine.load_weights(check_source(source))
        with self.shared.held() as engine:
            if waits and engine.asleep and engine.has_work:
                raise EngineError("the engine is asleep: its requests cannot finish; wake it up")
            while waits and engine.has_work:
                self.shared.step()
            engine.replace_weights(loaded, name)
        self._num_updates += 1
        return name

    @property
    def weight_version(self) -> str:
        """What the weights are called that requests are answered with now."""
        return self.engine.weight_version

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call something of every worker, of which there is one, between two steps; returns what
        each gave. `method` is one of `residence.RPC_METHODS`, or a function of this program that is
        called with the worker. `timeout` has no effect: nothing is waited for but the step of
        another thread."""
        if callable(method):
            with self.shared.held() as engine:
                return [engine.call_worker(method, *args, **(kwargs or {}))]
        check_rpc(method)
        return [getattr(self, method)(*args, **(kwargs or {}))]

    add_lora = absent(
        "add_lora", "give the adapter with the request: lora_request=LoRARequest(...)"
    )

    def is_sleeping(self) -> bool:
        """Return whether `sleep` has given memory back that is not there again."""
        return bool(self.engine.asleep)
