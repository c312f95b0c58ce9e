"""`AsyncLLM`: the engine for asyncio programs. Requests stream; the engine runs in a thread of its
own.

The event loop never computes and never waits for a step: that is left to `EngineThread`, where
prompts are tokenized, too. Every wait ends with the engine: if its thread dies, all streams raise
EngineError.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

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
from quire.core.adapters import Adapter
from quire.core.params import SamplingParams
from quire.core.pooling import PoolingParams, PoolingTask, check_task, read_truncation
from quire.core.scheduler.scheduler import Scheduler
from quire.engine.assembly.builder import build_engine
from quire.engine.front.absent import NO_PROFILE, BoundToProcess, absent
from quire.engine.front.digest import Digest
from quire.engine.front.model_view import ModelView
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt, with_truncation
from quire.engine.front.streams import Stream
from quire.engine.loop.engine import Engine
from quire.engine.loop.engine_thread import EngineThread
from quire.engine.pooling.outputs import PoolingRequestOutput, output_of
from quire.engine.pooling.requests import PoolingRequests
from quire.errors import (
    EngineError,
    InvalidParameterError,
    UnavailableError,
)
from quire.grammar.judge import judge
from quire.lora.request import LoRARequest
from quire.text.pretrained import PretrainedTokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from quire.engine.arg_utils import EngineArgs
    from quire.engine.front.metrics import Metric

_PAUSE_POLL_S = 0.01
PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of the requests in flight."""

_T = TypeVar("_T")


class AsyncLLM(BoundToProcess):
    """A model in this process, for asyncio. Safe to use from several threads, each with an event
    loop of its own.

    `options` are the fields of `EngineConfig`; an unknown one raises ConfigError with what it may
    have meant.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_options(model, options)
        self._engine = build_engine(self.config, is_streaming=True)
        self._link = EngineThread(self._engine)
        self._num_updates = 0
        self._request_numbers = itertools.count()
        self._pooling = PoolingRequests(self._engine.plan, self._engine.tokenizer)
        self._link.start()

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: object = None, **ignored: object
    ) -> Self:
        """Return a model of parsed arguments."""
        return cls(**engine_args.options())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Digest | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one request's outputs, cumulative unless `sampling_params.output_kind` says
        otherwise.

        With a digest of the engine's, what the parameters list is read and held once for all
        prompts that are given it. Leaving the loop early aborts the request. Raises a RequestError
        if it cannot be served. `trace_headers` have no effect.
        """
        params = sampling_params if sampling_params is not None else self._engine.default_params()
        if not isinstance(params, SamplingParams | Digest):
            raise InvalidParameterError(
                f"AsyncLLM takes SamplingParams, not {type(params).__name__}",
                param="sampling_params",
            )
        params = (
            with_truncation(params.clone(), tokenization_kwargs)
            if isinstance(params, SamplingParams)
            else params
        )
        asked = params.params if isinstance(params, Digest) else params
        if asked.structured_outputs is not None:
            await judge.check_async(asked.structured_outputs.wire)
        outputs = self._outputs(request_id, prompt, params, lora_request, priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """Yield, once, what the model makes of a prompt: a vector or one for each token, as
        `LLM.encode` does.

        Raises a RequestError if the request cannot be served, or fails. Prompts are tokenized in
        another thread. `trace_headers` have no effect.
        """
        given = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(given, PoolingParams):
            raise InvalidParameterError(
                f"pooling_params must be PoolingParams, not {type(given).__name__}",
                param="pooling_params",
            )
        params, task = given.clone(), pooling_task or given.task or self._pooling.default_task
        check_task(params, task)
        prepare = self._pooling.preparer(task, read_truncation(None, tokenization_kwargs))
        encoded, digest = await asyncio.to_thread(prepare, prompt, params)
        outputs = self._outputs(request_id, encoded, digest, lora_request, priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output_of(
                    PoolingRequestOutput, output, self._pooling.result(output, task, params)
                )

    async def _outputs(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | Digest,
        lora_request: LoRARequest | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Compute one request; leaving the loop early aborts it."""
        self._engine.refuse_nested_call()
        if self._engine.asleep and self.config.when_asleep == "refuse":
            raise UnavailableError("the engine is asleep", state="sleeping", retry_after_s=5)
        adapter = await self._version_of(lora_request)
        request_id = (
            f"async-{next(self._request_numbers)}"
            if request_id is None
            else checks.text("request_id", request_id)
        )
        stream = Stream()
        self._link.begin(
            request_id,
            lambda engine: engine.add_request(
                request_id, prompt, params, adapter=adapter, priority=priority
            ),
            stream,
        )
        is_finished = False
        try:
            async for output in stream:
                is_finished = output.finished
                output.name_adapter(lora_request)
                yield output
        finally:
            if not is_finished:
                self._link.leave(request_id, stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several; their streams end with what there is."""
        for each in checks.request_ids(request_id):
            self._link.abort(each)

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Compute nothing more until `resume_generation`; requests that come meanwhile wait.

        Those in flight are ended ("abort"), finished first ("wait"), or kept to go on later
        ("keep"). Unless they are kept, `clear_cache` forgets the cached KV. Of several replicas all
        pause, and one that is replaced meanwhile comes back paused.
        """
        if mode not in get_args(PauseMode):
            raise InvalidParameterError(
                f"mode={mode!r} is unknown; choose one of {', '.join(get_args(PauseMode))}",
                param="mode",
            )
        while (
            mode == "wait"
            and not self._engine.is_paused
            and await self._do(lambda engine: engine.has_work)
        ):
            await asyncio.sleep(_PAUSE_POLL_S)
        await self._do(lambda engine: self._pause(engine, mode, clear_cache))

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self._do(lambda engine: engine.resume())

    async def is_paused(self) -> bool:
        """Return whether `pause_generation` holds the engine."""
        return self._engine.is_paused

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget the cached KV of finished requests; see `LLMEngine.reset_prefix_cache`."""
        return await self._do(
            lambda engine: engine.reset_prefix_cache(preempts=reset_running_requests)
        )

    async def check_health(self) -> None:
        """Raises EngineError where the engine is closed or has died."""
        await self._do(lambda engine: None)

    @property
    def is_running(self) -> bool:
        """Whether requests can be taken."""
        return self._link.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self._link.failure is not None

    @property
    def model_config(self) -> ModelView:
        """The model's limits, and what its `config.json` says."""
        return self._engine.model

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters, under the names that vLLM gives them."""
        return self._engine.metrics()

    async def _version_of(self, request: LoRARequest | None) -> Adapter | None:
        """The adapter of a request; its files are read in another thread."""
        if request is None:
            return None
        chosen = await asyncio.to_thread(self._engine.adapters.chosen, request)
        return None if chosen is None else chosen.version

    async def _do(self, command: Callable[[Engine], _T]) -> _T:
        """Have the engine's thread do something between two steps;
        raises EngineError where the engine ends before it."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run(engine: Engine) -> None:
            try:
                done.set_result(command(engine))
            except Exception as error:
                done.set_exception(error)

        self._link.submit(run)
        return await asyncio.wrap_future(done)

    def _pause(self, engine: Engine, mode: PauseMode, clear_cache: bool) -> None:
        self._link.pause(engine)
        if mode == "abort":
            self._link.abort_all(engine)
        if mode != "keep" and clear_cache:
            engine.reset_prefix_cache()

    def get_tokenizer(self) -> PretrainedTokenizer:
        """Return the model's tokenizer, with the methods that transformers' have;
        ConfigError with `skip_tokenizer_init`."""
        return self._engine.pretrained_tokenizer()

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back to the system; see `LLMEngine.sleep`.
        Requests wait meanwhile, or are refused with `when_asleep="refuse"`."""
        level = check_level(level)
        await self._do(lambda engine: engine.sleep(level))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring the memory back; see `LLMEngine.wake_up`."""
        parts = check_parts(tags)
        await self._do(lambda engine: engine.wake_up(parts))

    async def update_weights(
        self,
        source: str | Path | Mapping[str, Tensor],
        *,
        version: str | None = None,
        requests: str = "resume",
    ) -> str:
        """Compute with other weights of the same model; see `LLMEngine.update_weights`. With
        "finish", requests that come meanwhile wait for the new ones."""
        waits = check_requests(requests)
        name = check_version(version, self._num_updates + 1)
        loaded = await asyncio.to_thread(self._engine.load_weights, check_source(source))
        if waits:
            await self._do(lambda engine: self._link.hold_arrivals())
        try:
            while waits and await self._do(lambda engine: engine.has_work):
                if self._engine.asleep or self._engine.is_paused:
                    raise EngineError("the engine sleeps or is paused: its requests cannot finish")
                await asyncio.sleep(_PAUSE_POLL_S)
            await self._do(lambda engine: engine.replace_weights(loaded, name))
        finally:
            if waits:
                await self._do(self._link.let_in)
        self._num_updates += 1
        return name

    @property
    def weight_version(self) -> str:
        """What the weights are called that requests are answered with now."""
        return self._engine.weight_version

    async def is_sleeping(self) -> bool:
        """Return whether memory is the system's at the moment."""
        return bool(self._engine.asleep)

    start_profile = absent("start_profile", NO_PROFILE)
    stop_profile = absent("stop_profile", NO_PROFILE)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call something of every worker; see `LLMEngine.collective_rpc`."""
        given = kwargs or {}
        if callable(method):
            call = method
            return [await self._do(lambda engine: engine.call_worker(call, *args, **given))]
        check_rpc(method)
        return [await getattr(self, method)(*args, **given)]

    @property
    def scheduler(self) -> Scheduler:
        """The control plane, to look at (it belongs to the engine's thread). AttributeError with
        several replicas, where it is in other processes."""
        return self._engine.scheduler

    def close(self, timeout_s: float = 30.0) -> None:
        """End all requests and free the model. Waits for the step in flight, at most `timeout_s`.
        Idempotent."""
        self._link.close(timeout_s)

    shutdown = close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)


AsyncLLMEngine = AsyncLLM
"""Its older name."""
