"""An engine made up for tests of the server: it says what it is told to, as fast as it is told to,
and fails on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.common.residence import check_level, check_parts
from quire.core.kvcache.events import KVEventBatch
from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.request import RequestMetrics
from quire.core.request_spec import RequestSpec
from quire.engine.front.client import Client
from quire.engine.front.digest import Digest
from quire.engine.front.model_info import ModelInfo
from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.requests import PreparedRequest
from quire.engine.front.sleep_clock import SleepClock
from quire.engine.front.status import EngineState, EngineStatus
from quire.engine.front.streams import Stream
from quire.engine.loop.cache import CachedTokens
from quire.engine.loop.inspection import BlockContent, Inspection
from quire.engine.pooling.requests import PoolingRequests
from quire.errors import NotAvailableError
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_model


@dataclass(slots=True)
class Script:
    """What a request gets: pieces of text, one a step, each for `num_tokens` tokens."""

    pieces: Sequence[str] = ("one", " two", " three")
    pause_s: float = 0.0
    """Before each piece."""
    gate: threading.Event | None = None
    """Where there is one, no more than `num_before_gate` pieces come until it is set."""
    num_before_gate: int = 0
    begins: bool = True
    """False: nothing ever comes."""
    error: str | None = None
    """Ends with this error after the pieces."""
    raises: Exception | None = None
    """Raised by `generate`."""


class FakeStream(Stream):
    """One request's outputs."""

    def __init__(
        self, request: PreparedRequest, script: Script, closed: Callable[[FakeStream], None]
    ) -> None:
        super().__init__()
        self.request = request
        self.script = script
        self.closed = closed
        self.is_closed = False
        self.is_finished = False
        self._playing: asyncio.Task[None] | None = None

    def listen(self, take: Callable[[RequestOutput], None]) -> None:
        super().listen(take)
        self._playing = asyncio.create_task(self._play())

    async def aclose(self) -> None:
        await super().aclose()
        if not self.is_closed:
            self.is_closed = True
            if self._playing is not None:
                self._playing.cancel()
            self.closed(self)

    async def _play(self) -> None:
        pieces = self.script.pieces
        if not self.script.begins:
            return
        is_final_only = self.request.params.output_kind is RequestOutputKind.FINAL_ONLY
        for number, piece in enumerate(pieces):
            await self._wait(number)
            if not is_final_only:
                self.put(self._output(piece, 1, None))
        self.is_finished = True
        last = self._output(
            "".join(pieces) if is_final_only else "",
            len(pieces) if is_final_only else 0,
            "error" if self.script.error else "stop",
        )
        last.error = self.script.error
        self.put(last)

    async def _wait(self, number: int) -> None:
        """Until a piece may come."""
        gate = self.script.gate
        while gate is not None and number >= self.script.num_before_gate and not gate.is_set():
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.script.pause_s)

    def _output(self, text: str, num_tokens: int, reason: str | None) -> RequestOutput:
        choices = [
            CompletionOutput(index, text, [5] * num_tokens, finish_reason=reason)
            for index in range(self.request.params.n)
        ]
        spec = self.request.spec
        metrics = RequestMetrics(1.0, 1.5, 2.0, 3.0, 3.0)
        return RequestOutput(
            spec.request_id,
            None,
            list(spec.prompt_token_ids),
            choices,
            reason is not None,
            metrics=metrics,
        )


@dataclass
class FakeClient(Client):
    """A client without a link."""

    script: Script = field(default_factory=Script)
    state: EngineState = "ready"
    num_running: int = 0
    policy: str = "fcfs"
    requests: list[PreparedRequest] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    num_aborted: int = 0
    sleep_clock: SleepClock = field(default_factory=SleepClock)
    inspection: Inspection | None = None
    content: BlockContent | None = None
    _tokenizer: Tokenizer | None = None

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(
            name="fake",
            folder="/nowhere",
            max_model_len=512,
            vocab_size=4096,
            max_logprobs=20,
            eos_token_ids=(2,),
            generation_config={},
            num_kv_slots=4096,
            policy=self.policy,
            fingerprint="0123456789abcdef",
        )

    @property
    def images(self) -> None:
        """It reads none."""
        return None

    @property
    def adapter_store(self) -> None:
        """None."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_folder(resolve_model("quire-storyteller"))
        return self._tokenizer

    @property
    def pooling(self) -> PoolingRequests:
        raise NotAvailableError("it generates text and makes no vectors")

    def digest(self, params: SamplingParams) -> Digest:
        return Digest(params, RequestSpec(sampling=params.to_row_sampling(seed=0)))

    def prepare(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        digest: Digest,
        **standing: Any,
    ) -> PreparedRequest:
        assert standing.pop("adapter", None) is None
        namespace = () if prompt.cache_salt is None else (prompt.cache_salt,)
        token_ids = tuple(prompt.token_ids)
        spec = replace(
            digest.spec,
            request_id=request_id,
            prompt_token_ids=token_ids,
            namespace=namespace,
            **standing,
        )
        return PreparedRequest(spec, digest, prompt.text)

    async def generate(self, request: PreparedRequest) -> FakeStream:
        if self.script.raises is not None:
            raise self.script.raises
        self.requests.append(request)
        stream = FakeStream(request, self.script, self._closed)
        self.streams.append(stream)
        return stream

    def _closed(self, stream: FakeStream) -> None:
        self.streams.remove(stream)
        if not stream.is_finished:
            self.num_aborted += 1

    async def abort(self, request_id: str) -> None:
        raise AssertionError("the server aborts by closing streams")

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self.state, num_running=self.num_running, num_requests=len(self.streams)
        )

    async def inspect(self, engine: str, since: int, replica: int = 0) -> Inspection | None:
        return self.inspection

    async def inspect_block(self, block: int, step: int, replica: int = 0) -> BlockContent | None:
        return self.content

    async def kv_events(self, log: str, since: int, replica: int = 0) -> KVEventBatch | None:
        return None

    async def cached_tokens(self, replica: int = 0) -> CachedTokens | None:
        return None

    async def clear_cache(self, tenant: str | None = None) -> int:
        return 0

    async def sleep(self, level: int = 1) -> None:
        check_level(level)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        check_parts(tags)

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        return None
