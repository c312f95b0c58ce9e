"""`EngineClient` over an engine in a process of its own, whose requests survive its death.

Owns the streams: each holds at most one output that its reader has not taken yet, into which further ones are merged, so a
slow reader costs no more than its answer; a listener is called at once, and bounds what it holds itself. Everything but the
streams belongs to the supervisor's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.common.file_states import lasting_name
from quire.config.engine import EngineConfig
from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.admission import Admission
from quire.engine.builder import PreparedModel
from quire.engine.client import EngineStatus, GenerationRequest, ModelInfo
from quire.engine.digest import Digest
from quire.engine.inspection import BlockContent, Inspection
from quire.engine.model_files import ModelFiles
from quire.engine.outputs import RequestOutput
from quire.engine.planning import EnginePlan
from quire.engine.process.journal import Journal
from quire.engine.process.launcher import EngineProcess
from quire.engine.process.messages import Inspect, Inspected, LookInto, Start
from quire.engine.process.supervisor import Seen, Supervisor
from quire.engine.process.watch import WatchConfig
from quire.errors import InvalidParameterError, UnavailableError
from quire.text.tokenizer import Tokenizer

MAX_NUM_REQUESTS = 4096
"""Requests in flight beyond which none is taken, whatever the server above allows: what the journal may hold."""
MAX_QUESTIONS = 32
"""Questions about the engine's state that may be unanswered at once."""
_ANSWER_TIMEOUT_S = 2.0
"""Questions are answered between two steps; a step that takes longer than this is told of in the status."""
_DRAIN_POLL_S = 0.02
_LAST_WORDS_S = 2.0
"""How long a drain that was cut short waits for the streams' last outputs."""
SHUTTING_DOWN = "the server is shutting down"


class ProcessClient:
    """Serves a model with an engine process. Make it and `start` it in a running event loop."""

    def __init__(self, prepared: PreparedModel, watch: WatchConfig | None = None, **launch_options: Any) -> None:
        start = start_message(prepared.planned.plan, prepared.planned.files)
        self._admission = Admission(prepared)
        self._tokenizer = prepared.tokenizer
        self._supervisor = Supervisor(
            lambda: EngineProcess(start, **launch_options), Journal(prepared.tokenizer), self._deliver, watch or WatchConfig()
        )
        self._supervisor.show = self._show
        self._streams: dict[str, _Stream] = {}
        self._num_prompt_tokens = 0
        """Of all streams; kept, since the status is asked for with every request."""
        self._questions: dict[int, asyncio.Future[Seen]] = {}
        self._num_questions = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_draining = False
        self._is_closed = False

    def start(self) -> None:
        """Begin to load the model; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._supervisor.start()

    @property
    def model(self) -> ModelInfo:
        return self._admission.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def digest(self, params: SamplingParams) -> Digest:
        return self._admission.digest(params)

    async def generate(self, request: GenerationRequest) -> _Stream:
        self._check_available()
        if request.request_id in self._streams:
            raise InvalidParameterError(f"request id {request.request_id!r} is already in use", param="request_id")
        prepared = self._admission.admit(request)
        stream = self._streams[request.request_id] = _Stream(request, self)
        self._num_prompt_tokens += len(request.prompt_token_ids)
        self._supervisor.add(prepared)
        return stream

    async def abort(self, request_id: str) -> None:
        self._supervisor.abort(request_id)

    def status(self) -> EngineStatus:
        supervisor, now = self._supervisor, time.monotonic()
        watch, state, reason = supervisor.watch, supervisor.state, supervisor.reason
        if self._is_closed or (self._is_draining and state != "failed"):
            state, reason = "closed" if self._is_closed else "draining", SHUTTING_DOWN
        elif state == "stalled":
            reason = watch.complaint(now) or "the engine shows no progress"
        pulse = watch.pulse
        num_waiting = max(pulse.num_waiting, len(self._streams) - pulse.num_running, 0)
        return EngineStatus(
            state=state,
            reason=reason,
            num_requests=len(self._streams),
            num_prompt_tokens=self._num_prompt_tokens,
            **pulse.counters() | {"num_waiting": num_waiting},
            last_step_age_s=None if not self._streams or watch.last_step_s is None else now - watch.last_step_s,
            last_sign_of_life_age_s=now - watch.last_sign_s if watch.last_sign_s else None,
            num_restarts=watch.num_restarts,
            engine_pid=supervisor.engine_pid,
        )

    async def inspect(self, engine: str, since: int) -> Inspection | None:
        self._num_questions += 1
        answer = await self._ask(Inspect(self._num_questions, engine, since))
        return answer.inspection if isinstance(answer, Inspected) else None

    async def look_into(self, block: int, step: int) -> BlockContent | None:
        self._num_questions += 1
        answer = await self._ask(LookInto(self._num_questions, block, step))
        return None if answer is None or isinstance(answer, Inspected) else answer.content

    async def _ask(self, question: Inspect | LookInto) -> Seen | None:
        if self._supervisor.state not in ("ready", "stalled") or len(self._questions) >= MAX_QUESTIONS:
            return None
        future: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._questions[question.number] = future
        self._supervisor.ask(question)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._questions[question.number]

    def _show(self, answer: Seen) -> None:
        """Called by the supervisor's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening any more
                self._loop.call_soon_threadsafe(self._take_answer, answer)

    def _take_answer(self, answer: Seen) -> None:
        future = self._questions.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)

    async def drain(self, timeout_s: float) -> bool:
        self._is_draining = True
        has_finished = await self._wait_for_streams(timeout_s)
        if not has_finished:
            self._supervisor.end_all(SHUTTING_DOWN)
            await self._wait_for_streams(_LAST_WORDS_S)
        await self.close()
        return has_finished

    async def close(self) -> None:
        self._is_draining = self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._supervisor.close)
        await asyncio.sleep(0)  # what the supervisor delivered last is taken in
        for stream in list(self._streams.values()):
            stream.put(RequestOutput(stream.request.request_id, None, [], [], finished=True, error=SHUTTING_DOWN))
        self._streams.clear()
        self._num_prompt_tokens = 0

    async def _wait_for_streams(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self._streams and not self._is_closed and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self._streams

    def _check_available(self) -> None:
        if self._is_draining or self._is_closed:
            raise UnavailableError(SHUTTING_DOWN, state="draining", retry_after_s=5)
        if self._supervisor.state == "failed":
            raise UnavailableError(f"the engine has failed: {self._supervisor.reason}", state="failed")
        if len(self._streams) >= MAX_NUM_REQUESTS:
            raise UnavailableError(f"{MAX_NUM_REQUESTS} requests are in flight already", state="overloaded", retry_after_s=1)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Called by the supervisor's thread."""
        if outputs and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening any more
                self._loop.call_soon_threadsafe(self._put, outputs)

    def _put(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        if self._streams.pop(stream.request.request_id, None) is not None:
            self._num_prompt_tokens -= len(stream.request.prompt_token_ids)

    def leave(self, stream: _Stream) -> None:
        """A stream's reader has gone."""
        if self._streams.get(stream.request.request_id) is stream:
            self._forget(stream)
            self._supervisor.abort(stream.request.request_id)


class _Stream:
    """One request's outputs, of which at most one waits for the reader."""

    def __init__(self, request: GenerationRequest, client: ProcessClient) -> None:
        self.request = request
        self._client = client
        self._waiting: RequestOutput | None = None
        self._has_news = asyncio.Event()
        self._is_finished = False
        self._take: Callable[[RequestOutput], None] | None = None

    def listen(self, take: Callable[[RequestOutput], None]) -> None:
        """See `CallingStream`."""
        self._take = take
        if self._waiting is not None:
            output, self._waiting = self._waiting, None
            self.put(output)

    def put(self, output: RequestOutput) -> None:
        """Give the reader something; in the event loop's thread."""
        if self._take is not None:
            self._is_finished = output.finished
            self._take(output)
            return
        is_delta = self.request.params.output_kind is RequestOutputKind.DELTA
        self._waiting = output if self._waiting is None or not is_delta else merge(self._waiting, output)
        self._has_news.set()

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_finished:
            raise StopAsyncIteration
        await self._has_news.wait()
        output, self._waiting = self._waiting, None
        assert output is not None
        self._has_news.clear()
        self._is_finished = output.finished
        return output

    async def aclose(self) -> None:
        self._take = None  # which knows this stream: nobody would free either before the cycle collector
        if not self._is_finished:
            self._is_finished = True
            self._client.leave(self)


def merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two successive deltas as one."""
    before = {each.index: each for each in earlier.outputs}
    for each in later.outputs:
        known = before.pop(each.index, None)
        if known is not None:
            each.text = known.text + each.text
            each.token_ids = known.token_ids + each.token_ids
            if known.logprobs is not None:
                each.logprobs = known.logprobs + (each.logprobs or [])
    later.outputs += before.values()
    later.prompt_logprobs = later.prompt_logprobs if later.prompt_logprobs is not None else earlier.prompt_logprobs
    return later


def start_message(plan: EnginePlan, files: ModelFiles | None = None) -> Start:
    """What an engine is to build: the decisions of a plan, so that each engine after another has the same limits.

    With `files`, each is built of these very files, wherever it runs, or not at all.
    """
    limits, config = plan.limits, plan.config
    options: Mapping[str, Any] = asdict(config) | {
        "dtype": plan.dtype,
        "block_size": limits.block_size,
        "kv_cache_memory": plan.kv_bytes,
        "populate_kv_cache": "on" if plan.is_kv_populated else "off",
        "memory_utilization": 1.0,  # what is sensible has been decided; what is impossible is still refused
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "num_threads": plan.num_threads,
        "tokenizer": _absolute(config.tokenizer),
        "weights_cache": _absolute(config.weights_cache),
    }
    model = config.model if files is None else str(files.path)
    defaults = EngineConfig(model=model)
    given = {name: value for name, value in options.items() if name != "model" and value != getattr(defaults, name)}
    if files is None:
        return Start(model, given)
    return Start(model, given, files.states(config.tokenizer))


def _absolute(name: str | None) -> str | None:
    """A local path as it means the same wherever a process runs; a name of something else as it is."""
    if name is None:
        return None
    path = Path(name).expanduser()
    return str(lasting_name(path)) if path.exists() else name
