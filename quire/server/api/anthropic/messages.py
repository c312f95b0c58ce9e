"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API for text, reasoning and
calls."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.core.params import SamplingParams
from quire.core.request_spec import Keep
from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.errors import RequestError
from quire.server.api.answer_format import AnswerFormat
from quire.server.api.anthropic.blocks import Block, ContentBlocks, Turn, messages_of
from quire.server.api.anthropic.breakpoints import (
    BlockPlace,
    breakpoints,
    marked_system,
    marked_tools,
    marked_turns,
)
from quire.server.api.anthropic.context import apply_edits, read_edits
from quire.server.api.anthropic.shapes import (
    OfferedTool,
    OutputConfig,
    OutputFormat,
    TextBlock,
    Thinking,
    ToolChoice,
)
from quire.server.api.anthropic.tools import read_tools
from quire.server.api.conversation import (
    ChatPrompt,
    Conversation,
    EncodedChat,
)
from quire.server.api.generation import GenerationJob, GenerationRun, Usage
from quire.server.api.openai.fields import NO_EFFECT, Count, UserMetadata, asks_for_something
from quire.server.api.openai.messages import text_of
from quire.server.api.prompt_encoder import NOT_IN_TEMPLATE
from quire.server.api.structure import Asked, from_schema
from quire.server.http.body import read_json, shape
from quire.server.http.call import Call, call_of
from quire.server.http.errors import ApiError, bad_request, unavailable_feature
from quire.server.http.off_loop import off_loop
from quire.server.http.responses import (
    EventStream,
    answer_chars,
    json_response,
    named_event,
    timings,
)
from quire.server.state import Api

MAX_STOPS = 16
_UNAVAILABLE = {
    "mcp_servers": "this server fetches nothing",
    "container": "containers are not available",
    "compaction": "conversations are not summarized by this server",
}
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Anthropic's tool runner opens a thread by itself; after a refusal in these words it goes on with
whole conversations."""
_HINTS = ("speed", "inference_geo", "diagnostics", "fallbacks")
_NEUTRAL = (None, "standard", "default")
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
_NOT_APART = "what this model thinks is not told apart from its answers"


class MessagesQuery(msgspec.Struct, kw_only=True):
    """What Anthropic's clients append to the URL;
    everything here is what it is with and without it."""

    beta: Literal["true", "false"] = "false"


class CountRequest(msgspec.Struct, kw_only=True):
    """What decides a prompt."""

    model: Annotated[str, Meta(max_length=256)]
    messages: list[Turn]
    system: str | list[Annotated[dict[str, Any], shape(TextBlock)]] | None = None
    thinking: Annotated[dict[str, Any], shape(Thinking)] | None = None
    tool_choice: Annotated[Any, shape(ToolChoice)] = None
    tools: list[Annotated[Any, shape(OfferedTool)]] | None = None
    mcp_servers: Any = None
    container: Any = None
    context_management: Any = None
    compaction: Any = None
    thread: Any = None
    output_format: Annotated[Any, shape(OutputFormat)] = None
    output_config: Annotated[dict[str, Any], shape(OutputConfig)] | None = None
    cache_control: Any = None
    """As in blocks and tools, for the whole prompt. It is cached in any case, and kept for that
    time."""

    @property
    def thinking_kind(self) -> str | None:
        """What `thinking.type` says. Raises ApiError 400."""
        kind = None if self.thinking is None else self.thinking.get("type")
        if self.thinking is not None and kind not in _THINKING:
            raise bad_request(
                f"thinking.type: it must be one of {', '.join(_THINKING)}", param="thinking.type"
            )
        return kind


class _Encoded(NamedTuple):
    """What a request's turns, tools and edits come to."""

    prompt: ChatPrompt
    edits: dict[str, Any] | None
    """The report on `context_management`, where that was given."""
    original_len: int
    """Tokens of the prompt before it was edited."""
    conversation: Conversation
    turns: Sequence[Turn]
    """Those that the conversation has."""


class MessageRequest(CountRequest, kw_only=True):
    """The body of a request for an answer."""

    max_tokens: Count
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=MAX_STOPS)
        ]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stream: bool | None = None
    metadata: UserMetadata | None = None
    service_tier: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    speed: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    fallbacks: Any = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    timings: bool | None = None


@dataclass(slots=True)
class _PreparedMessages:
    request: MessageRequest
    job: GenerationJob
    model: str
    encoded: _Encoded
    prepare_s: float
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def body(self, content: list[Block], usage: dict[str, Any]) -> dict[str, Any]:
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

    @property
    def edits(self) -> dict[str, Any]:
        """What was cleared from the conversation, where the request has edits."""
        return {} if self.encoded.edits is None else {"context_management": self.encoded.edits}

    def timings(self, output: RequestOutput, usage: Usage) -> dict[str, Any]:
        """Return where the time went, if requested."""
        if not self.request.timings:
            return {}
        num_tokens = usage.num_output_tokens
        return {
            "timings": timings(
                output.metrics, prepare_s=self.prepare_s, num_output_tokens=num_tokens
            )
        }


class Messages:
    """The endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def post(self, request: Request) -> Response:
        """Answer, in one piece or as a stream of events."""
        call = call_of(request)
        body = await read_json(request, MessageRequest, is_strict=self._api.config.strict_fields)
        started_s = time.monotonic()
        model = self._api.choose_generator(call, body.model)
        call.ignore((name for name in _HINTS if getattr(body, name) not in _NEUTRAL), NO_EFFECT)
        encoded = await self._encode(call, body)
        _, token_ids, answer_format, form, images = encoded.prompt
        given = answer_format.constraints(
            form,
            "output_format" if body.output_format is not None else "output_config.format",
        )
        params = self._params(
            body, len(token_ids), given | await self._budget(call, body, answer_format)
        )
        job = GenerationJob(token_ids, params, None, body.cache_salt, body.priority, images=images)
        job.keep = await self._kept(body, encoded)
        prepared = _PreparedMessages(body, job, model, encoded, time.monotonic() - started_s)
        if not body.stream:
            return json_response(call, await self._create(call, prepared, request.receive))
        run = await self._api.generator.start(call, [prepared.job], is_stream=True)
        return EventStream(
            call, run, _MessageEvents(call, prepared, run), self._api.config.keep_alive_s
        )

    async def count_tokens(self, request: Request) -> Response:
        """Return how many tokens the prompt has."""
        body = await read_json(request, CountRequest, is_strict=self._api.config.strict_fields)
        self._api.check_model(body.model)
        encoded = await self._encode(call_of(request), body)
        answer: dict[str, Any] = {"input_tokens": len(encoded.prompt.token_ids)}
        if encoded.edits is not None:
            answer["context_management"] = {"original_input_tokens": encoded.original_len}
        return json_response(call_of(request), answer)

    async def _encode(self, call: Call, body: CountRequest) -> _Encoded:
        """Return the prompt and how its answer is read. A last turn of the
        assistant's is one to go on with."""
        api = self._api
        for name, reason in _UNAVAILABLE.items():
            if _asks_for_something(getattr(body, name)):
                raise unavailable_feature(name, reason)
        if _asks_for_something(body.thread):
            raise ApiError(
                400,
                "thread: conversations are not kept; send all of their messages",
                param="thread",
                code="unsupported_parameter",
                details=_NO_THREADS,
            )
        size = call.num_body_bytes
        edits, asked = read_edits(body.context_management), _asked_form(body)
        offered = await off_loop(size, lambda: read_tools(body.tools, body.tool_choice))
        system = text_of(body.system or None, "system")
        whole = Conversation(
            messages=(),
            tools=await api.prompts.tools(offered, asked),
            asked=asked,
            is_continued=bool(body.messages) and body.messages[-1].role == "assistant",
            template_kwargs=self._template_kwargs(call, body),
            num_body_bytes=size,
            media_scope=call.tenant.media_scope(getattr(body, "cache_salt", None)),
        )

        async def encode(turns: Sequence[Turn]) -> tuple[Conversation, EncodedChat]:
            unread: list[str] = []
            messages = await off_loop(size, lambda: messages_of(turns, system, unread))
            conversation = replace(whole, messages=messages)
            encoded = await api.prompts.encode_chat(conversation)
            if turns is body.messages:
                call.ignore(unread, "these thoughts can be read by those who made them only")
            return conversation, encoded

        first = await encode(body.messages)

        async def count(turns: Sequence[Turn]) -> int:
            _, encoded = first if turns is body.messages else await encode(turns)
            return len(encoded.token_ids)

        edited = await apply_edits(body.messages, edits, count)
        last = first if edited.turns is body.messages else await encode(edited.turns)
        prompt = await api.prompts.chat(*last)
        report = (
            None if body.context_management is None else {"applied_edits": list(edited.applied)}
        )
        return _Encoded(prompt, report, len(first[1][1]), last[0], edited.turns)

    async def _kept(self, body: MessageRequest, encoded: _Encoded) -> tuple[Keep, ...]:
        """Return what `cache_control` keeps: prompts up to the blocks that carry one."""
        kept, turns = list[Keep](), encoded.turns
        for place, seconds in await off_loop(
            encoded.conversation.num_body_bytes,
            lambda: breakpoints(body.cache_control, body.tools, body.system, turns),
        ):
            num_tokens = None if place is None else await self._num_tokens_to(place, body, encoded)
            if num_tokens is not None or place is None or not place.is_tool:
                kept.append(Keep(num_tokens, seconds))
        return tuple(kept)

    async def _num_tokens_to(
        self, place: BlockPlace, body: MessageRequest, encoded: _Encoded
    ) -> int | None:
        """Return the tokens of a prompt up to the end of a block; None where the template does not
        show what stands there, or takes no more than what is there."""
        prompt, conversation = encoded.prompt, encoded.conversation
        mark, tools = f"m{secrets.token_hex(8)}", conversation.tools
        if tools is not None:
            tools = replace(tools, shown=marked_tools(place, body.tools, tools.shown, mark))
        system = text_of(marked_system(place, body.system or None, mark), "system")

        def marked(*, is_behind: bool) -> Conversation:
            turns = marked_turns(place, encoded.turns, mark, is_behind=is_behind)
            return replace(conversation, messages=messages_of(turns, system), tools=tools)

        for is_behind in (False, True):
            # the request itself has been taken, whatever becomes of a mark in it
            with contextlib.suppress(ApiError, RequestError):
                shown = await off_loop(
                    conversation.num_body_bytes, partial(marked, is_behind=is_behind)
                )
                num_tokens = await self._api.prompts.num_tokens_before(
                    mark, shown, prompt.text, prompt.images
                )
                if num_tokens is not None:
                    return num_tokens
        return None

    def _template_kwargs(self, call: Call, body: CountRequest) -> dict[str, Any] | None:
        """Return what the template is told of the thinking that is wanted;
        what it cannot be told is named in a header."""
        source = self._api.prompts.template_source
        kwargs: dict[str, Any] = {}
        kind, has_tags = body.thinking_kind, self._api.prompts.tags is not None
        if kind is not None and "enable_thinking" in source:
            kwargs["enable_thinking"] = kind != "disabled"
        elif kind == "disabled" and has_tags:
            call.ignore(["thinking"], NOT_IN_TEMPLATE)
        elif kind not in (None, "disabled") and not has_tags:
            call.ignore(["thinking"], _NOT_APART)
        if has_tags and (body.thinking or {}).get("display") == "omitted":
            call.ignore(
                ["thinking.display"],
                "thoughts are shown as they come; disable them, or pass them over",
            )
        effort = (body.output_config or {}).get("effort")
        if effort is not None and "reasoning_effort" in source:
            kwargs["reasoning_effort"] = effort
        elif effort is not None:
            call.ignore(["output_config.effort"], NOT_IN_TEMPLATE)
        return kwargs or None

    def _params(
        self, body: MessageRequest, num_prompt_tokens: int, given: dict[str, Any]
    ) -> SamplingParams:
        values = {
            name: value
            for name, value in self._api.sampling_defaults.items()
            if name != "max_tokens"
        }
        for name in ("temperature", "top_k", "seed"):
            value = getattr(body, name)
            if value is not None:
                values[name] = value
        if body.top_p is not None:
            values["top_p"] = body.top_p or 1e-9
        max_tokens = self._api.prompts.max_tokens(
            num_prompt_tokens, body.max_tokens, default=None, param="max_tokens"
        )
        return SamplingParams(**values, **given, max_tokens=max_tokens, stop=body.stop_sequences)

    async def _budget(
        self, call: Call, body: MessageRequest, answer_format: AnswerFormat
    ) -> dict[str, Any]:
        """Return the sampling parameters for `thinking.budget_tokens`;
        where nothing is to be thought there is none."""
        budget = (body.thinking or {}).get("budget_tokens")
        if budget is None or body.thinking_kind == "disabled":
            return {}
        if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget < 1 << 31:
            raise bad_request(
                "thinking.budget_tokens: it must be an integer, 0 or above", param="thinking"
            )
        if self._api.prompts.tags is None:
            call.ignore(["thinking.budget_tokens"], _NOT_APART)
            return {}
        return await self._api.prompts.thinking(budget, answer_format, "thinking.budget_tokens")

    async def _create(
        self, call: Call, prepared: _PreparedMessages, receive: Receive
    ) -> dict[str, Any]:
        (output,), usage = await self._api.generator.answer(call, [prepared.job], receive)
        completion = output.outputs[0]
        blocks = ContentBlocks(prepared.encoded.prompt.answer_format)
        await self._api.prompts.work(answer_chars(output), lambda: blocks.take(completion))
        body = prepared.body(blocks.content, _usage(usage))
        return {
            **body,
            **_stop(completion, blocks),
            **prepared.edits,
            **prepared.timings(output, usage),
        }


def _asks_for_something(value: Any) -> bool:
    """As of any optional field; an object without anything in it is a way of leaving it out,
    too."""
    return (
        any(map(asks_for_something, value.values()))
        if isinstance(value, dict)
        else asks_for_something(value)
    )


def _asked_form(body: CountRequest) -> list[Asked]:
    """Return the output schema of `output_config.format`, or of its older name."""
    asked: list[Asked] = []
    forms = {
        "output_format": body.output_format,
        "output_config.format": (body.output_config or {}).get("format"),
    }
    for name, form in forms.items():
        if form is None:
            continue
        schema = (
            form.get("schema")
            if isinstance(form, dict) and form.get("type") == "json_schema"
            else None
        )
        if not isinstance(schema, dict):
            raise bad_request(
                f"{name}: it must have the type json_schema, and a schema", param=name
            )
        asked.append(from_schema(schema, f"{name}.schema"))
    return asked


def _usage(usage: Usage) -> dict[str, Any]:
    """Tokens read from the cache and written to it are counted apart, as Anthropic does: the three
    together are the prompt."""
    num_read, num_written = usage.num_cached_tokens, usage.num_cache_write_tokens
    return {
        "input_tokens": usage.num_prompt_tokens - num_read - num_written,
        "cache_read_input_tokens": num_read,
        "cache_creation_input_tokens": num_written,
        "output_tokens": usage.num_output_tokens,
    }


def _stop(completion: CompletionOutput, blocks: ContentBlocks) -> dict[str, Any]:
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    ended = "tool_use" if blocks.has_calls else "end_turn"
    return {
        "stop_reason": "max_tokens" if completion.finish_reason == "length" else ended,
        "stop_sequence": None,
    }


class _MessageEvents:
    """From `message_start` to `message_stop`."""

    def __init__(self, call: Call, prepared: _PreparedMessages, run: GenerationRun) -> None:
        self._call = call
        self._prepared = prepared
        self._run = run
        self._last: RequestOutput | None = None
        self._blocks = ContentBlocks(prepared.encoded.prompt.answer_format)

    def take(self, number: int, output: RequestOutput) -> bytes:
        """See `Events`."""
        opening = b""
        if self._last is None:
            usage = {**_usage(self._run.usage), "output_tokens": 0}
            opening = _event("message_start", message=self._prepared.body([], usage))
        self._last = output
        return opening + b"".join(
            _event(each.kind, **each.fields) for each in self._blocks.take(output.outputs[0])
        )

    def end(self) -> bytes:
        """See `Events`."""
        assert self._last is not None, "a run ends with an output"
        usage, stop = self._run.usage, _stop(self._last.outputs[0], self._blocks)
        more = {**self._prepared.edits, **self._prepared.timings(self._last, usage)}
        delta = _event("message_delta", delta=stop, usage=_usage(usage), **more)
        return delta + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        """See `Events`."""
        return named_event("error", error.anthropic_body(self._call.request_id))


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
