"""`EngineClient` over an `AsyncLLM` in this process: for tests and small programs. If this engine dies, its requests do too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import cast

from quire.core.params import SamplingParams
from quire.engine.admission import Admission
from quire.engine.async_llm import AsyncLLM
from quire.engine.builder import PreparedModel
from quire.engine.client import EngineStatus, GenerationRequest, ModelInfo
from quire.engine.counters import count
from quire.engine.digest import Digest
from quire.engine.inspection import BlockContent, Inspection
from quire.engine.outputs import RequestOutput
from quire.errors import EngineError, InvalidParameterError, UnavailableError
from quire.text.tokenizer import Tokenizer

_DRAIN_POLL_S = 0.02


class LocalClient:
    """Serves requests with an engine that the caller owns and closes."""

    def __init__(self, llm: AsyncLLM, prepared: PreparedModel) -> None:
        self._llm = llm
        self._admission = Admission(prepared)
        self._tokenizer = prepared.tokenizer
        self._streams: dict[str, _LocalStream] = {}
        self._is_draining = False
        self._is_closed = False

    @property
    def model(self) -> ModelInfo:
        return self._admission.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def digest(self, params: SamplingParams) -> Digest:
        return self._admission.digest(params)

    async def generate(self, request: GenerationRequest) -> _LocalStream:
        if self._is_closed or self._is_draining:
            raise UnavailableError("the server is shutting down", state="draining", retry_after_s=5)
        if request.request_id in self._streams:
            raise InvalidParameterError(f"request id {request.request_id!r} is already in use", param="request_id")
        stream = _LocalStream(self._llm, (request, self._admission.admit(request).digest), self._streams)
        self._streams[request.request_id] = stream
        return stream

    async def abort(self, request_id: str) -> None:
        await self._llm.abort(request_id)

    def status(self) -> EngineStatus:
        is_ending = self._is_closed or self._is_draining
        return EngineStatus(
            state="closed" if self._is_closed else "draining" if self._is_draining else "ready",
            reason="the server is shutting down" if is_ending else "",
            num_requests=len(self._streams),
            num_prompt_tokens=sum(stream.num_prompt_tokens for stream in self._streams.values()),
            **count(self._llm.scheduler).counters(),
        )

    async def inspect(self, engine: str, since: int) -> Inspection | None:
        return await self._llm.ask(
            lambda asked: None if asked.recorder is None else asked.recorder.inspect(engine, since, asked.now())
        )

    async def look_into(self, block: int, step: int) -> BlockContent | None:
        return await self._llm.ask(lambda asked: None if asked.recorder is None else asked.recorder.content(block, step))

    async def drain(self, timeout_s: float) -> bool:
        self._is_draining = True
        deadline_s = time.monotonic() + timeout_s
        while self._streams and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        is_empty = not self._streams
        await self.close()
        return is_empty

    async def close(self) -> None:
        self._is_draining = self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._llm.close)


class _LocalStream:
    """One request's outputs. What the engine raises becomes its last output."""

    def __init__(self, llm: AsyncLLM, admitted: tuple[GenerationRequest, Digest], streams: dict[str, _LocalStream]) -> None:
        asked, digest = admitted
        self._asked = asked
        self._streams = streams
        prompt = {"prompt_token_ids": asked.prompt_token_ids}
        if asked.cache_salt is not None:
            prompt["cache_salt"] = asked.cache_salt  # type: ignore[assignment]
        outputs = llm.generate(prompt, digest, asked.request_id, priority=asked.priority)  # type: ignore[arg-type]
        self._outputs = cast("AsyncGenerator[RequestOutput]", outputs)
        self._is_finished = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._asked.prompt_token_ids)

    def __aiter__(self) -> _LocalStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_finished:
            raise StopAsyncIteration
        try:
            output = await anext(self._outputs)
        except EngineError as error:
            output = RequestOutput(self._asked.request_id, None, [], [], finished=True, error=str(error))
        output.prompt = self._asked.prompt
        if output.finished:
            self._end()
        return output

    async def aclose(self) -> None:
        self._end()
        await self._outputs.aclose()

    def _end(self) -> None:
        self._is_finished = True
        self._streams.pop(self._asked.request_id, None)
