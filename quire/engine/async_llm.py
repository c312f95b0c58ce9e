"""`AsyncLLM`: the engine for asyncio programs. Requests stream; the engine runs in a thread of its own.

The event loop never computes and never waits for a step: commands go to the engine's thread through a queue, outputs come
back through one asyncio queue per request. Every wait ends with the engine: if its thread dies, all streams raise EngineError.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from quire.common.failures import log_failure
from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.core.scheduler.scheduler import Scheduler
from quire.engine.absent import NO_EMBEDDINGS, NO_PROFILE, NO_RPC, NO_SLEEP, absent, refuse_adapters
from quire.engine.builder import build_engine
from quire.engine.digest import Digest
from quire.engine.engine import Engine
from quire.engine.metrics import Metric, snapshot
from quire.engine.model_view import ModelView
from quire.engine.outputs import RequestOutput
from quire.engine.prompts import Prompt, with_truncation
from quire.errors import EngineError, InvalidParameterError, QuireError
from quire.grammar.judge import judge
from quire.text.pretrained import PretrainedTokenizer

if TYPE_CHECKING:
    from quire.engine.arg_utils import EngineArgs

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 2.0
_PAUSE_POLL_S = 0.01
_IDLE_WAIT_S = 0.5
"""How long the idle thread sleeps between looks at whether it should stop; a command wakes it at once."""

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of the requests in flight."""

_Item = RequestOutput | BaseException
_T = TypeVar("_T")


class _Stream:
    """One request's way back to the event loop it came from."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()

    def put(self, item: _Item) -> None:
        """Called from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> RequestOutput:
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncLLM:
    """A model in this process, for asyncio. Safe to use from several threads, each with an event loop of its own.

    `options` are the fields of `EngineConfig`; an unknown one raises ConfigError with what it may have meant.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_options(model, options)
        self._is_paused = False
        self._engine = build_engine(self.config, is_streaming=True)
        self._engine.record_steps()
        self._commands: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._request_numbers = itertools.count()
        self._is_closing = False
        self._is_over = False
        self._ending = threading.Lock()
        """Guards `_is_over`: a command is either queued before the thread's last look at the queue, or refused."""
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None, **ignored: object) -> Self:
        """A model of parsed arguments."""
        return cls(**engine_args.options())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Digest | None = None,
        request_id: str | None = None,
        *,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one request's outputs, cumulative unless `sampling_params.output_kind` says otherwise.

        With a digest of the engine's, what the parameters list is read and held once for all prompts that are given it.
        Leaving the loop early aborts the request. Raises a RequestError if it cannot be served. `trace_headers` have no effect.
        """
        refuse_adapters(lora_request)
        self._engine.refuse_nested_call()
        params = sampling_params if sampling_params is not None else self._engine.default_params()
        if not isinstance(params, SamplingParams | Digest):
            raise InvalidParameterError(f"AsyncLLM takes SamplingParams, not {type(params).__name__}", param="sampling_params")
        params = with_truncation(params.clone(), tokenization_kwargs) if isinstance(params, SamplingParams) else params
        asked = params.params if isinstance(params, Digest) else params
        if asked.structured_outputs is not None:
            await judge.check_async(asked.structured_outputs.wire)
        request_id = request_id if request_id is not None else f"async-{next(self._request_numbers)}"
        stream = _Stream()
        self._submit(lambda engine: self._add(engine, request_id, (prompt, params, priority), stream))
        is_finished = False
        try:
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            if not is_finished:
                with contextlib.suppress(EngineError):  # an engine that is over has no request to abort
                    self._submit(lambda engine: self._abort(engine, request_id, stream))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several; their streams end with what there is."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            self._submit(lambda engine, request_id=each: self._abort(engine, request_id, None))  # type: ignore[misc]

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Compute nothing more until `resume_generation`; requests that come meanwhile wait.

        Those in flight are ended ("abort"), finished first ("wait"), or kept to go on later ("keep"). Unless they are kept,
        `clear_cache` forgets the cached KV.
        """
        if mode not in get_args(PauseMode):
            raise InvalidParameterError(
                f"mode={mode!r} is unknown; choose one of {', '.join(get_args(PauseMode))}", param="mode"
            )
        while mode == "wait" and not self._is_paused and await self._do(lambda engine: engine.has_work):
            await asyncio.sleep(_PAUSE_POLL_S)
        await self._do(lambda engine: self._pause(engine, mode, clear_cache))

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        self._is_paused = False
        await self._do(lambda engine: None)

    async def is_paused(self) -> bool:
        """Whether `pause_generation` holds the engine."""
        return self._is_paused

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the cached KV of finished requests; see `LLMEngine.reset_prefix_cache`."""
        return await self._do(lambda engine: engine.reset_prefix_cache(preempts=reset_running_requests))

    async def check_health(self) -> None:
        """Raises EngineError where the engine is closed or has died."""
        await self._do(lambda engine: None)

    @property
    def is_running(self) -> bool:
        """Whether requests can be taken."""
        return not self._is_over and not self._is_closing

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self._failure is not None

    @property
    def model_config(self) -> ModelView:
        """The model's limits, and what its `config.json` says."""
        return self._engine.model

    def get_metrics(self) -> list[Metric]:
        """The engine's counters, under the names that vLLM gives them."""
        return snapshot(self._engine.scheduler, self.config.model)

    async def _do(self, command: Callable[[Engine], _T]) -> _T:
        """Have the engine's thread do something between two steps; raises EngineError where the engine ends before it."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run(engine: Engine) -> None:
            try:
                done.set_result(command(engine))
            except Exception as error:
                done.set_exception(error)

        self._submit(run)
        return await asyncio.wrap_future(done)

    def _pause(self, engine: Engine, mode: PauseMode, clear_cache: bool) -> None:
        self._is_paused = True
        if mode == "abort":
            for request_id in list(engine.scheduler.requests):
                self._abort(engine, request_id, None)
        if mode != "keep" and clear_cache:
            engine.reset_prefix_cache()

    async def ask(self, question: Callable[[Engine], _T]) -> _T | None:
        """Ask the engine something between two steps; None where it does not answer in time."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()

        def take(value: _T) -> None:
            if not answer.done():
                answer.set_result(value)

        def reply(engine: Engine) -> None:
            value = question(engine)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening any more
                loop.call_soon_threadsafe(take, value)

        self._submit(reply)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            return None

    def get_tokenizer(self) -> PretrainedTokenizer:
        """The model's tokenizer, with the methods that transformers' have; ConfigError with `skip_tokenizer_init`."""
        return self._engine.pretrained_tokenizer()

    encode = absent("encode", NO_EMBEDDINGS)
    sleep = absent("sleep", NO_SLEEP)
    wake_up = absent("wake_up", NO_SLEEP)
    start_profile = absent("start_profile", NO_PROFILE)
    stop_profile = absent("stop_profile", NO_PROFILE)
    collective_rpc = absent("collective_rpc", NO_RPC)

    @property
    def scheduler(self) -> Scheduler:
        """The control plane, to look at (it belongs to the engine's thread)."""
        return self._engine.scheduler

    def close(self, timeout_s: float = 30.0) -> None:
        """End all requests and free the model. Waits for the step in flight, at most `timeout_s`. Idempotent."""
        self._is_closing = True
        with contextlib.suppress(EngineError):
            self._submit(lambda engine: None)  # wakes an idle thread
        self._thread.join(timeout_s)

    shutdown = close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._take_commands()
                if self._can_step:
                    for output in self._engine.step():
                        if isinstance(output, RequestOutput):
                            self._deliver(output)
                elif not self._engine.has_work:
                    self._engine.idle()
        except BaseException as error:
            log_failure(logger, "the engine's thread died", error)
            self._failure = error
        finally:
            self._end_streams()

    @property
    def _can_step(self) -> bool:
        return self._engine.has_work and not self._is_paused

    def _take_commands(self) -> None:
        """Carry out what is queued; an idle engine waits for something."""
        with contextlib.suppress(queue.Empty):
            if not self._can_step:
                self._commands.get(timeout=_IDLE_WAIT_S)(self._engine)
            while True:
                self._commands.get_nowait()(self._engine)

    def _add(
        self, engine: Engine, request_id: str, request: tuple[Prompt, SamplingParams | Digest, int], stream: _Stream
    ) -> None:
        prompt, params, priority = request
        try:
            engine.add_request(request_id, prompt, params, priority=priority)
        except Exception as error:
            if not isinstance(error, QuireError):
                log_failure(logger, f"request {request_id} could not be added", error)
                error = EngineError(f"the request could not be added: {type(error).__name__}")
            stream.put(error)
            return
        self._streams[request_id] = stream

    def _abort(self, engine: Engine, request_id: str, stream: _Stream | None) -> None:
        """Abort by id, or on behalf of a stream: one that was refused because its id is in use must not end another's."""
        if stream is not None and self._streams.get(request_id) is not stream:
            return
        output = engine.abort(request_id)
        if output is not None:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:
            stream.put(output)
            if output.finished:
                del self._streams[output.request_id]

    def _end_streams(self) -> None:
        """Nothing runs any more: refuse new commands, and tell everyone who still waits."""
        with self._ending:
            self._is_over = True
        with contextlib.suppress(Exception):
            self._engine.close()
        for stream in self._streams.values():
            stream.put(self._last_word())
        self._streams.clear()
        with contextlib.suppress(queue.Empty):
            while True:  # a closed engine refuses what is added now, and its stream hears of it
                self._commands.get_nowait()(self._engine)

    def _submit(self, command: Callable[[Engine], None]) -> None:
        with self._ending:
            if self._is_over:
                raise self._last_word()
            self._commands.put(command)

    def _last_word(self) -> EngineError:
        return EngineError(
            "the engine was closed" if self._failure is None else f"the engine died: {type(self._failure).__name__}"
        )


AsyncLLMEngine = AsyncLLM
"""Its older name."""
