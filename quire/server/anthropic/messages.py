"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API for text."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.core.params import SamplingParams
from quire.engine.outputs import CompletionOutput
from quire.server.body import read_json
from quire.server.call import Call, call_of
from quire.server.errors import ApiError, bad_request, unavailable_feature
from quire.server.generation import Job, Run, Usage
from quire.server.openai.fields import Count, asks_for_something
from quire.server.openai.messages import text_of
from quire.server.responses import KEEP_ALIVE, EventStream, json_response, named_event
from quire.server.state import Api
from quire.server.texts import ChatOptions

MAX_STOPS = 16
_UNAVAILABLE = {
    "tools": "tool use is not available on this server yet",
    "mcp_servers": "this server fetches nothing",
    "container": "containers are not available",
    "context_management": "contexts are not managed by this server",
    "output_format": "structured output is not available on this server yet",
}


class TurnMessage(msgspec.Struct, kw_only=True):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class CountRequest(msgspec.Struct, kw_only=True):
    """What decides a prompt."""

    model: Annotated[str, Meta(max_length=256)]
    messages: list[TurnMessage]
    system: str | list[dict[str, Any]] | None = None
    thinking: Any = None
    tool_choice: Any = None
    tools: Any = None
    mcp_servers: Any = None
    container: Any = None
    context_management: Any = None
    output_format: Any = None


class MessageRequest(CountRequest, kw_only=True):
    """The body of a request for an answer."""

    max_tokens: Count
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=MAX_STOPS)] | None = (
        None
    )
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None


@dataclass(slots=True)
class _Prepared:
    request: MessageRequest
    job: Job
    model: str
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def body(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Anthropic's message object, not ended yet."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


class Messages:
    """The endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def post(self, request: Request) -> Response:
        """Answer, in one piece or as a stream of events."""
        call = call_of(request)
        body = await read_json(request, MessageRequest, is_strict=self._api.config.strict_fields)
        model = self._api.check_model(body.model)
        token_ids = await self._encode(body)
        prepared = _Prepared(body, Job(token_ids, self._params(body, len(token_ids))), model)
        if not body.stream:
            return json_response(call, await self._create(call, prepared, request.receive))
        run = await self._api.generator.start(call, [prepared.job], is_stream=True)
        events = _stream(prepared, run, self._api.config.keep_alive_s)
        return EventStream(call, run, events, lambda error: _failure(error, call.request_id))

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt has."""
        body = await read_json(request, CountRequest, is_strict=self._api.config.strict_fields)
        self._api.check_model(body.model)
        return json_response(call_of(request), {"input_tokens": len(await self._encode(body))})

    async def _encode(self, body: CountRequest) -> list[int]:
        """The prompt. A last message of the assistant's is one to go on with."""
        for name, reason in _UNAVAILABLE.items():
            if asks_for_something(getattr(body, name)):
                raise unavailable_feature(name, reason)
        if isinstance(body.thinking, dict) and body.thinking.get("type") != "disabled":
            raise unavailable_feature("thinking", "extended thinking is not available on this server")
        if not body.messages:
            raise bad_request("messages: at least one is needed", param="messages")
        messages = [
            {"role": each.role, "content": text_of(each.content, f"messages[{number}].content")}
            for number, each in enumerate(body.messages)
        ]
        system = text_of(body.system, "system")
        if system:
            messages.insert(0, {"role": "system", "content": system})
        is_continued = body.messages[-1].role == "assistant"
        _, token_ids = await self._api.texts.encode_chat(messages, ChatOptions(continue_final_message=is_continued))
        return token_ids

    def _params(self, body: MessageRequest, num_prompt_tokens: int) -> SamplingParams:
        values = {name: value for name, value in self._api.sampling_defaults.items() if name != "max_tokens"}
        for name in ("temperature", "top_k", "seed"):
            value = getattr(body, name)
            if value is not None:
                values[name] = value
        if body.top_p is not None:
            values["top_p"] = body.top_p or 1e-9
        max_tokens = self._api.texts.max_tokens(num_prompt_tokens, body.max_tokens, default=None, param="max_tokens")
        return SamplingParams(**values, max_tokens=max_tokens, stop=body.stop_sequences)

    async def _create(self, call: Call, prepared: _Prepared, receive: Receive) -> dict[str, Any]:
        (output,), usage = await self._api.generator.answer(call, [prepared.job], receive)
        completion = output.outputs[0]
        content = [{"type": "text", "text": completion.text}] if completion.text else []
        return {**prepared.body(content, _usage(usage)), **_stop(completion)}


def _usage(usage: Usage) -> dict[str, Any]:
    """Cached tokens are counted apart, as Anthropic does."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.num_output_tokens,
    }


def _stop(completion: CompletionOutput) -> dict[str, Any]:
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "max_tokens" if completion.finish_reason == "length" else "end_turn", "stop_sequence": None}


async def _stream(prepared: _Prepared, run: Run, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    """From `message_start` to `message_stop`, with one block of text."""
    last: CompletionOutput | None = None
    while not run.is_over:
        item = await run.get(keep_alive_s)
        if item is None:
            yield KEEP_ALIVE
            continue
        parts = b""
        if last is None:
            usage = {**_usage(run.usage), "output_tokens": 0}
            parts += _event("message_start", message=prepared.body([], usage))
            parts += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        last = item[1].outputs[0]
        if last.text:
            parts += _event("content_block_delta", index=0, delta={"type": "text_delta", "text": last.text})
        yield parts
    assert last is not None, "a run ends with an output"
    yield _event("content_block_stop", index=0)
    yield _event("message_delta", delta=_stop(last), usage=_usage(run.usage))
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _failure(error: ApiError, request_id: str) -> bytes:
    return named_event("error", error.anthropic_body(request_id))
