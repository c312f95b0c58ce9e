"""An engine made up for tests of the server: it says what it is told to, as fast as it is told to, and fails on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.request import RequestMetrics
from quire.core.request_spec import RequestSpec
from quire.engine.client import EngineState, EngineStatus, GenerationRequest, ModelInfo
from quire.engine.digest import Digest
from quire.engine.inspection import BlockContent, Inspection
from quire.engine.outputs import CompletionOutput, RequestOutput
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


@dataclass(slots=True, eq=False)
class FakeStream:
    """One request's outputs."""

    request: GenerationRequest
    script: Script
    closed: Callable[[FakeStream], None]
    position: int = 0
    is_closed: bool = False
    is_finished: bool = False
    text: str = ""

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.is_finished:
            raise StopAsyncIteration
        if not self.script.begins:
            await asyncio.Event().wait()
        if self.request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            for number in range(len(self.script.pieces)):
                await self._wait(number)
            return self._last("".join(self.script.pieces), len(self.script.pieces))
        if self.position == len(self.script.pieces):
            return self._last("", 0)
        await self._wait(self.position)
        self.position += 1
        return self._output(self.script.pieces[self.position - 1], 1, None)

    async def aclose(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.closed(self)

    async def _wait(self, number: int) -> None:
        """Until a piece may come."""
        gate = self.script.gate
        while gate is not None and number >= self.script.num_before_gate and not gate.is_set():
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.script.pause_s)

    def _last(self, text: str, num_tokens: int) -> RequestOutput:
        self.is_finished = True
        output = self._output(text, num_tokens, "error" if self.script.error else "stop")
        output.error = self.script.error
        return output

    def _output(self, text: str, num_tokens: int, reason: str | None) -> RequestOutput:
        choices = [
            CompletionOutput(index, text, [5] * num_tokens, finish_reason=reason) for index in range(self.request.params.n)
        ]
        ids = list(self.request.prompt_token_ids)
        metrics = RequestMetrics(1.0, 1.5, 2.0, 3.0, 3.0)
        return RequestOutput(self.request.request_id, None, ids, choices, reason is not None, metrics=metrics)


@dataclass(slots=True)
class FakeClient:
    """An `EngineClient`."""

    script: Script = field(default_factory=Script)
    state: EngineState = "ready"
    num_running: int = 0
    policy: str = "fcfs"
    requests: list[GenerationRequest] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    num_aborted: int = 0
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
    def tokenizer(self) -> Tokenizer | None:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_folder(resolve_model("quire-storyteller"))
        return self._tokenizer

    def digest(self, params: SamplingParams) -> Digest:
        return Digest(params, RequestSpec(sampling=params.to_row_sampling(seed=0)))

    async def generate(self, request: GenerationRequest) -> FakeStream:
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
        return EngineStatus(state=self.state, num_running=self.num_running, num_requests=len(self.streams))

    async def inspect(self, engine: str, since: int) -> Inspection | None:
        return self.inspection

    async def look_into(self, block: int, step: int) -> BlockContent | None:
        return self.content

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        return None
