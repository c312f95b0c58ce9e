"""An engine as a server sees it, wherever it runs: one client, over a link to an engine in this
process or in another.

Torch-free. `quire.engine.process.supervisor.Supervisor` is the link to an engine process, whose
requests survive its death; `quire.engine.replicas.link.Replicas` one to several of these;
`quire.engine.loop.engine_thread.EngineThread` the one to an engine in this process.

How to use it: `prepare` judges a request and raises what is wrong with it (a RequestError) before
anything is streamed; `stream = await client.generate(prepared)` accepts it, or raises an
UnavailableError if nothing can be taken now; `async for output in stream` then yields outputs as
`output_kind` says and always ends with one that is `finished`, also where the engine failed (its
`error` says why). Leaving the loop early, or `await stream.aclose()`, aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import msgspec

from quire.common.residence import (
    PARTS,
    UNDER_WAY,
    check_level,
    check_parts,
    check_requests,
    check_version,
)
from quire.core.kvcache.events import KVEventBatch
from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.request import FIRST_VERSION
from quire.engine.assembly.preparation import PreparedModel
from quire.engine.front.digest import Digest
from quire.engine.front.failures import divided, like, not_awake
from quire.engine.front.images import image_reader
from quire.engine.front.model_info import ModelInfo, model_info
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import ParsedPrompt, check_token_ids
from quire.engine.front.requests import PreparedRequest, RequestBuilder
from quire.engine.front.sleep_clock import SleepClock
from quire.engine.front.status import EngineState, EngineStatus
from quire.engine.front.streams import OutputSink, Stream, merge_deltas
from quire.engine.loop.cache import (
    CacheByTenant,
    CachedTokens,
    CacheQuestion,
    ClearCache,
    EventsSince,
)
from quire.engine.loop.inspection import BlockContent, Inspection
from quire.engine.pooling.requests import PoolingRequests
from quire.engine.process.messages import (
    AskCache,
    CacheAnswered,
    Command,
    Done,
    Inspect,
    InspectBlock,
    Inspected,
    InspectedBlock,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from quire.errors import (
    EngineError,
    InvalidParameterError,
    NotAvailableError,
    QuireError,
    UnavailableError,
)
from quire.lora.store import AdapterStore
from quire.media.reader import ImageReader
from quire.text.tokenizer import Tokenizer

MAX_NUM_REQUESTS = 4096
"""Requests in flight beyond which none is taken, whatever the server above allows:
what the journal may hold."""
MAX_QUESTIONS = 32
"""Questions about the engine's state that may be unanswered at once."""
SHUTTING_DOWN = "the server is shutting down"
_ANSWER_TIMEOUT_S = 2.0
"""Questions are answered between two steps;
a step that takes longer than this is told of in the status."""
_COMMAND_TIMEOUT_S = 600.0
"""For weights that are written, read or loaded."""
_DRAIN_POLL_S = 0.02
_LAST_WORDS_S = 2.0
"""How long a drain that was cut short waits for the streams' last outputs."""

Question = Inspect | InspectBlock | AskCache | Command
Seen = Inspected | InspectedBlock | CacheAnswered | Done


class Link(Protocol):
    """The way to an engine, with the thread that serves requests on it. For any thread;
    nothing waits but `close`."""

    show: Callable[[Seen], None]
    """Called in the link's thread with each answer to a question."""

    def start(self) -> None:
        """Begin to serve; before that, nothing is computed."""
        ...

    def add(self, prepared: PreparedRequest, stream: OutputSink) -> None:
        """Serve a request; its outputs go to `stream`."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends with what there is. Unknown ids are ignored."""
        ...

    def ask(self, question: Question, replica: int = 0) -> None:
        """Put a question to an engine, to be answered between two steps, if it can be."""
        ...

    def end_all(self, message: str) -> None:
        """End every request with an error."""
        ...

    def close(self, timeout_s: float = ...) -> None:
        """End everything, the engine included. Idempotent."""
        ...

    def status(self, num_requests: int, num_prompt_tokens: int) -> EngineStatus:
        """Return how the engine is doing, given what the client has in flight."""
        ...


class Client:
    """An engine as a server sees it. All methods but `digest` and `prepare` are for one event
    loop's thread.

    Requests are accepted while the model is loading or the engine is restarting, and then wait.
    """

    def __init__(self, prepared: PreparedModel, link: Link) -> None:
        plan = prepared.planned.plan
        self._model = model_info(prepared)
        self._tokenizer = prepared.tokenizer
        self._builder = RequestBuilder(plan, prepared.tokenizer, prepared.eos_token_ids)
        self._pooling = PoolingRequests(plan, prepared.tokenizer)
        self._images = image_reader(plan)
        adapters = plan.adapters
        self._adapter_store = None if adapters is None else AdapterStore(plan.spec, adapters.limits)
        self.link = link
        link.show = self._show
        self._streams: dict[str, _ClientStream] = {}
        self._num_prompt_tokens = 0
        """Of all streams; kept, since every request reads the status."""
        self._questions: dict[int, asyncio.Future[Seen]] = {}
        self._num_questions = 0
        self._num_updates = 0
        self._weights = (self._model.folder, FIRST_VERSION)
        self._update: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        """Held while engines are told to sleep, or to wake up."""
        self.sleep_clock = SleepClock()
        self._refuses_asleep = plan.config.when_asleep == "refuse"
        self._is_draining = False
        self._is_closed = False

    @property
    def model(self) -> ModelInfo:
        """The model; known before it is loaded."""
        return self._model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer (None with `skip_tokenizer_init`). Encode long texts in a thread:
        it releases the GIL."""
        return self._tokenizer

    @property
    def pooling(self) -> PoolingRequests:
        """What the model makes of texts besides answers; it says so where that is nothing."""
        return self._pooling

    @property
    def images(self) -> ImageReader | None:
        """What reads images of requests; None where the model reads none."""
        return self._images

    @property
    def adapter_store(self) -> AdapterStore | None:
        """Return the versions of adapters; None where none are served."""
        return self._adapter_store

    def digest(self, params: SamplingParams) -> Digest:
        """Read parameters once for any number of requests; they must not be changed afterwards.
        Raises a RequestError.

        For any thread: it takes as long as what they list is long.
        """
        return self._builder.digest(params)

    def prepare(
        self, request_id: str, prompt: ParsedPrompt, digest: Digest, **standing: Any
    ) -> PreparedRequest:
        """Make the spec of a request; see `RequestBuilder.sampling`. Raises a RequestError if it
        can never be served.

        The id is unique among the requests in flight, and appears in logs.
        """
        if digest.params.logits_processors:
            raise InvalidParameterError(
                "logits_processors are functions, which do not travel to an engine process",
                param="logits_processors",
            )
        prompt = prompt._replace(token_ids=check_token_ids(prompt.token_ids, self.model.vocab_size))
        return self._builder.sampling(request_id, prompt, digest, **standing)

    async def generate(self, prepared: PreparedRequest) -> Stream:
        """Accept a request. Raises UnavailableError where nothing can be taken now."""
        self._check_available()
        request_id = prepared.spec.request_id
        if request_id in self._streams:
            raise InvalidParameterError(
                f"request id {request_id!r} is already in use", param="request_id"
            )
        stream = self._streams[request_id] = _ClientStream(prepared, self)
        self._num_prompt_tokens += len(prepared.spec.prompt_token_ids)
        try:
            self.link.add(prepared, stream)
        except EngineError as error:  # the engine has ended meanwhile
            stream.fail(error)
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with what there is and `finish_reason="abort"`.
        Unknown ids are ignored."""
        self.link.abort(request_id)

    def status(self) -> EngineStatus:
        """Return how the engine is doing. Never blocks."""
        status = self.link.status(len(self._streams), self._num_prompt_tokens)
        if self._is_closed or (self._is_draining and status.state != "failed"):
            state: EngineState = "closed" if self._is_closed else "draining"
            return msgspec.structs.replace(status, state=state, reason=SHUTTING_DOWN)
        return status

    async def inspect(self, engine: str, since: int, replica: int = 0) -> Inspection | None:
        """Return the engine's steps after step `since` of `engine` (as an earlier inspection named
        it), and its state now; of several engines, those of the one with this number.

        Everything that is kept, where that engine or step is not known. None where the engine
        cannot be asked now.
        """
        answer = await self._ask(Inspect(self._next_number(), engine, since), replica)
        return answer.inspection if isinstance(answer, Inspected) else None

    async def inspect_block(self, block: int, step: int, replica: int = 0) -> BlockContent | None:
        """Return what a KV block held in a step; None where it is not known (any more),
        or the engine cannot be asked now."""
        answer = await self._ask(InspectBlock(self._next_number(), block, step), replica)
        return answer.content if isinstance(answer, InspectedBlock) else None

    async def kv_events(self, log: str, since: int, replica: int = 0) -> KVEventBatch | None:
        """Return what was cached and evicted after the event `since` of a log (as an earlier batch
        named it); everything that is cached, where these are not known. None where the engine
        cannot be asked now."""
        return (await self._ask_cache(EventsSince(log, since), replica)).events

    async def cached_tokens(self, replica: int = 0) -> CachedTokens | None:
        """Return what the prompt cache holds; None where the engine cannot be asked now."""
        return (await self._ask_cache(CacheByTenant(), replica)).tokens

    async def clear_cache(self, tenant: str | None = None) -> int:
        """Forget what is cached of a tenant, or of all, and not in use; return how many blocks of
        the pools. Raises UnavailableError."""
        num_blocks = 0
        for replica in range(max(1, len(self.status().replicas))):
            cleared = (await self._ask_cache(ClearCache(tenant), replica)).cleared
            if cleared is None:
                state = self.status().state
                raise UnavailableError(
                    f"the cache cannot be cleared now: the engine is {state}",
                    state=state,
                    retry_after_s=5,
                )
            num_blocks += cleared.num_blocks
        return num_blocks

    async def _ask_cache(self, question: CacheQuestion, replica: int) -> CacheAnswered:
        answer = await self._ask(AskCache(self._next_number(), question), replica)
        return answer if isinstance(answer, CacheAnswered) else CacheAnswered(0)

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back to the system; what runs goes on after
        `wake_up`, with the same answers. Of several engines all do, or those that did are woken
        again. Raises a QuireError where that cannot be, which says which engine failed."""
        level = check_level(level)
        await self._to_the_end(self._sleep_all(level))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring the parts of the memory back that are named, by default all. Of several engines,
        one that fails keeps no other asleep. Raises a QuireError, which says which failed."""
        parts = check_parts(tags)
        await self._to_the_end(self._wake_all(parts))

    async def _to_the_end(self, change: Coroutine[Any, Any, None]) -> None:
        """Carry out a change to what all engines have in memory, one such at a time. A caller that
        leaves must not leave it half done."""

        async def run() -> None:
            async with self._changing:
                with self.sleep_clock.watching(self._states):
                    await change

        await asyncio.shield(asyncio.create_task(run()))

    async def _sleep_all(self, level: int) -> None:
        states = self._states()
        for replica in range(len(states)):
            try:
                await self._command_one(Sleep(self._next_number(), level), replica)
            except QuireError as error:
                if len(states) == 1:
                    raise
                # this one, too, which may have heard
                begun = [each for each in range(replica + 1) if states[each] != "sleeping"]
                failed = await self._wake(PARTS, begun)
                failed.pop(replica, None)
                outcome = not_awake(failed) or "the others are as they were"
                message = f"replica {replica} does not sleep: {error}; {outcome}"
                raise like(error, message) from error

    async def _wake_all(self, parts: tuple[str, ...]) -> None:
        replicas = range(len(self._states()))
        failed = await self._wake(parts, replicas)
        if failed:
            error = next(iter(failed.values()))
            raise error if len(replicas) == 1 else like(error, not_awake(failed))

    async def _wake(self, parts: tuple[str, ...], replicas: Iterable[int]) -> dict[int, QuireError]:
        """Wake engines; return which of them could not be, and why."""
        failed = dict[int, QuireError]()
        for replica in replicas:
            try:
                await self._command_one(WakeUp(self._next_number(), parts), replica)
            except QuireError as error:
                failed[replica] = error
        return failed

    def _states(self) -> list[EngineState]:
        """How each engine is doing."""
        status = self.status()
        return [each.state for each in status.replicas or (status,)]

    def _next_number(self) -> int:
        self._num_questions += 1
        return self._num_questions

    _weights = ("", FIRST_VERSION)
    """Where the weights of all engines are from, and what they are called."""

    @property
    def weight_version(self) -> str:
        """What the weights are called that requests are answered with now."""
        return self._weights[1]

    async def update_weights(
        self, folder: str, version: str | None = None, *, requests: str = "resume"
    ) -> str:
        """Have requests be answered with the weights of a folder from now on; returns the version's
        name. Those that run go on with them ("resume") or end with the former ones ("finish").
        Several engines change one after another, and each answer says its version. Raises a
        QuireError where the weights cannot be taken; nothing has changed then."""
        waits = check_requests(requests)
        if self._update is not None and not self._update.done():
            raise EngineError(UNDER_WAY)
        version = check_version(version, self._num_updates + 1)
        self._num_updates += 1
        self._update = asyncio.create_task(self._update_all(folder, version, waits))
        await asyncio.shield(self._update)  # a caller that leaves must not leave it half done
        return version

    async def _update_all(self, folder: str, version: str, waits: bool) -> None:
        replicas = range(max(1, len(self.status().replicas)))
        for replica in replicas:
            try:
                await self._update_one(folder, version, waits, replica)
            except QuireError as error:
                if len(replicas) == 1:
                    raise
                await self._go_back(replicas[:replica])
                said = f"replica {replica} does not take the weights: {error}"
                raise like(error, f"{said}; the others are as they were") from error
        self._weights = (folder, version)

    async def _update_one(self, folder: str, version: str, waits: bool, replica: int) -> None:
        command = UpdateWeights(self._next_number(), folder, version, waits)
        await self._command_one(command, replica)

    async def _go_back(self, replicas: Iterable[int]) -> None:
        """Have replicas compute with the weights that those have which an update did not reach."""
        failed = dict[int, QuireError]()
        for replica in replicas:
            try:
                await self._update_one(*self._weights, False, replica)
            except QuireError as error:
                failed[replica] = error
        if failed:
            raise EngineError(divided(failed)) from next(iter(failed.values()))

    async def _command_one(self, command: Command, replica: int) -> None:
        answer = await self._ask(command, replica, _COMMAND_TIMEOUT_S)
        if not isinstance(answer, Done):
            state = self._states()[replica]
            raise UnavailableError(
                f"the engine takes no commands: it is {state}", state=state, retry_after_s=5
            )
        if answer.error is not None:
            raise (NotAvailableError if answer.is_lasting else EngineError)(answer.error)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those in flight; True if all ended in time.

        Those that did not end then with an error, so that every stream has a last output.
        """
        self._is_draining = True
        has_finished = await self._wait_for_streams(timeout_s)
        if not has_finished:
            with contextlib.suppress(EngineError):  # it is over: the streams have heard
                self.link.end_all(SHUTTING_DOWN)
            await self._wait_for_streams(_LAST_WORDS_S)
        await self.close()
        return has_finished

    async def close(self) -> None:
        """End everything at once: streams end with an error. Idempotent."""
        self._is_draining = self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(None, self.link.close)
        if self._adapter_store is not None:
            self._adapter_store.close()
        await asyncio.sleep(0)  # what the link delivered last is taken in
        for stream in list(self._streams.values()):
            stream.fail(EngineError(SHUTTING_DOWN))

    def forget(self, stream: _ClientStream, *, has_left: bool) -> None:
        """Forget a stream that has ended; its request has, too, unless its reader left."""
        spec = stream.prepared.spec
        del self._streams[spec.request_id]
        self._num_prompt_tokens -= len(spec.prompt_token_ids)
        if has_left:
            with contextlib.suppress(EngineError):  # an engine that is over has no request to abort
                self.link.abort(spec.request_id)

    def _check_available(self) -> None:
        if self._is_draining or self._is_closed:
            raise UnavailableError(SHUTTING_DOWN, state="draining", retry_after_s=5)
        status = self.status()
        if status.state == "failed":
            raise UnavailableError(f"the engine has failed: {status.reason}", state="failed")
        if status.state == "sleeping" and self._refuses_asleep:
            raise UnavailableError("the engine is asleep", state="sleeping", retry_after_s=5)
        if len(self._streams) >= MAX_NUM_REQUESTS:
            raise UnavailableError(
                f"{MAX_NUM_REQUESTS} requests are in flight already",
                state="overloaded",
                retry_after_s=1,
            )

    async def _wait_for_streams(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self._streams and not self._is_closed and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self._streams

    async def _ask(
        self, question: Question, replica: int = 0, timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> Seen | None:
        status = self.status()
        if status.replicas:
            status = status.replicas[replica]
        can_ask = status.state in ("ready", "sleeping", "stalled")
        if not can_ask or len(self._questions) >= MAX_QUESTIONS:
            return None
        future: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._questions[question.number] = future
        self.link.ask(question, replica)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._questions[question.number]

    def _show(self, answer: Seen) -> None:
        """Called by the link's thread."""
        future = self._questions.get(answer.number)
        if future is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the asker has gone
                future.get_loop().call_soon_threadsafe(_answer, future, answer)


def _answer(future: asyncio.Future[Seen], answer: Seen) -> None:
    if not future.done():
        future.set_result(answer)


class _ClientStream(Stream):
    """A stream whose reader hears of failures as a last output.
    Deltas that wait for a slow reader are merged."""

    def __init__(self, prepared: PreparedRequest, client: Client) -> None:
        is_delta = prepared.params.output_kind is RequestOutputKind.DELTA
        super().__init__(merge_deltas if is_delta else lambda earlier, later: later)
        self.prepared = prepared
        self._client = client

    def fail(self, error: BaseException) -> None:
        spec = self.prepared.spec
        self.put(
            RequestOutput(
                spec.request_id, self.prepared.prompt, [], [], finished=True, error=str(error)
            )
        )

    def ended(self, *, has_left: bool) -> None:
        self._client.forget(self, has_left=has_left)
