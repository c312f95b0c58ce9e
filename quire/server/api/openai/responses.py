"""POST /v1/responses and what belongs to it: answers of reasoning, text and calls,
continued by `previous_response_id`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.core.params import SamplingParams
from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.server.api.answer_format import AnswerFormat
from quire.server.api.conversation import ChatPrompt, Conversation
from quire.server.api.generation import GenerationJob, GenerationRun, Usage
from quire.server.api.openai.fields import (
    NO_EFFECT,
    Budget,
    CommonFields,
    Count,
    Metadata,
    TopLogprobs,
    asks_for_something,
    check_common,
    check_num_logprobs,
    sampling_params,
)
from quire.server.api.openai.listing import Listing, page_of
from quire.server.api.openai.logprobs import LogprobTracker, TokenNames
from quire.server.api.openai.messages import for_template
from quire.server.api.openai.response_items import (
    InputReader,
    Item,
    OutputItems,
    is_whole,
    messages_of,
    new_id,
)
from quire.server.api.openai.response_store import AskedInput, ResponseStore, StoredResponse
from quire.server.api.openai.sealed import Sealer
from quire.server.api.openai.shapes import (
    InputItem,
    Reasoning,
    ResponseStreamOptions,
    ResponseTool,
    TextOptions,
    ToolChoice,
)
from quire.server.api.openai.tools import RESPONSES, read_tools
from quire.server.api.prompt_encoder import NOT_IN_TEMPLATE, effort_kwargs
from quire.server.api.retention import Retention, retention
from quire.server.api.structure import (
    Asked,
    from_named_schema,
    from_response_format,
)
from quire.server.api.tools import Function
from quire.server.http.body import read_bytes, read_json, shape
from quire.server.http.call import Call, call_of
from quire.server.http.errors import ApiError, bad_request, unavailable_feature
from quire.server.http.off_loop import off_loop
from quire.server.http.query import query_of
from quire.server.http.responses import (
    EventStream,
    answer_chars,
    json_response,
    named_event,
    timings,
)
from quire.server.state import Api

_UNAVAILABLE = {
    "background": "answers in the background are not available; leave it out, or use /v1/batches",
    "conversation": "conversations are not kept; use previous_response_id",
    "prompt": "stored prompts are not available",
    "context_management": "contexts are not managed by this server",
}
_HINTS = ("max_tool_calls",)
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
_INCLUDABLE = (
    _LOGPROBS, _SEALED, "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
"""All that OpenAI documents. Those besides the first two belong to tools and images,
which no answer of this server has."""


class ResponseRequest(CommonFields, kw_only=True):
    """The body."""

    input: str | list[Annotated[dict[str, Any], shape(InputItem)]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: TopLogprobs | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    text: Annotated[dict[str, Any], shape(TextOptions)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    tools: list[Annotated[Any, shape(ResponseTool)]] | None = None
    tool_choice: Annotated[Any, shape(ToolChoice)] = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    service_tier: str | None = None
    stream_options: Annotated[Any, shape(ResponseStreamOptions)] = None
    reasoning: Annotated[dict[str, Any], shape(Reasoning)] | None = None
    thinking_token_budget: Budget | None = None
    max_tool_calls: Any = None

    background: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None


class KeptQuery(msgspec.Struct, kw_only=True):
    """How a kept answer is to come."""

    stream: Literal["true", "false"] = "false"


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """What decides a prompt, all of it optional."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    conversation: Any = None

    def whole(self) -> ResponseRequest:
        """Return the request for an answer that has this prompt."""
        return ResponseRequest(
            **{**msgspec.structs.asdict(self), "input": [] if self.input is None else self.input}
        )


class _Input(NamedTuple):
    """What a request's input, instructions and tools come to."""

    conversation: Conversation
    messages: list[dict[str, Any]]
    """The conversation's, without the instructions."""
    items: list[Item]
    functions: list[Function]


@dataclass(slots=True)
class _PreparedResponse:
    request: ResponseRequest
    job: GenerationJob
    model: str
    functions: list[Function]
    asked: AskedInput | None
    """None where the answer is not to be kept."""
    answer_format: AnswerFormat
    names: TokenNames
    seal: Callable[[str], str] | None
    """None where reasoning is not to be sealed."""
    prepare_s: float
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def has_logprobs(self) -> bool:
        return self.job.params.logprobs is not None

    def add_timings(self, answer: dict[str, Any], output: RequestOutput, usage: Usage) -> None:
        """Add where the time went, if requested."""
        if self.request.timings:
            num_tokens = usage.num_output_tokens
            answer["timings"] = timings(
                output.metrics, prepare_s=self.prepare_s, num_output_tokens=num_tokens
            )

    def output_items(self) -> OutputItems:
        return OutputItems(self.answer_format, self.seal)

    def tracker(self) -> LogprobTracker | None:
        return (
            LogprobTracker(self.names, self.request.top_logprobs or 0)
            if self.has_logprobs
            else None
        )


class Responses:
    """The endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._store = ResponseStore(api.config.max_stored_responses, api.config.max_stored_bytes)
        self._sealer = Sealer()

    async def post(self, request: Request) -> Response:
        """Answer, in one piece or as a stream of events."""
        call = call_of(request)
        body = await read_json(request, ResponseRequest, is_strict=self._api.config.strict_fields)
        prepared = await self._prepare(call, body)
        if not body.stream:
            answer = await self._create(call, prepared, request.receive)
            return await off_loop(call.num_body_bytes, lambda: json_response(call, answer))
        run = await self._api.generator.start(call, [prepared.job], is_stream=True)
        events = _ResponseEvents(prepared, run, lambda answer: self._keep(call, prepared, answer))
        return EventStream(call, run, events, self._api.config.keep_alive_s)

    async def input_tokens(self, request: Request) -> Response:
        """Return how many tokens the prompt of such a request has."""
        call = call_of(request)
        body = (
            await read_json(request, InputTokensRequest, is_strict=self._api.config.strict_fields)
        ).whole()
        self._api.check_model(body.model)
        _check(body)
        token_ids = self._truncated(
            body, await self._api.prompts.chat((await self._input(call, body)).conversation)
        )
        return json_response(
            call, {"object": "response.input_tokens", "input_tokens": len(token_ids)}
        )

    async def get(self, request: Request) -> Response:
        """Return an answer that was kept."""
        call = call_of(request)
        if query_of(request, KeptQuery).stream == "true":
            raise unavailable_feature("stream", "an answer that was kept is given in one piece")
        kept = self._store.get(call.tenant.name, request.path_params["response_id"])
        return await off_loop(kept.num_bytes, lambda: json_response(call, kept.body))

    async def input_items(self, request: Request) -> Response:
        """Return the input items of a kept answer, newest first by default."""
        call, query = call_of(request), query_of(request, Listing)
        kept = self._store.get(call.tenant.name, request.path_params["response_id"])
        return await off_loop(
            kept.num_bytes, lambda: json_response(call, page_of(kept.input_items, query))
        )

    async def delete(self, request: Request) -> Response:
        """Forget an answer."""
        call, response_id = call_of(request), request.path_params["response_id"]
        self._store.delete(call.tenant.name, response_id)
        return json_response(call, {"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Only answers in the background can be cancelled, and there are none."""
        self._store.get(call_of(request).tenant.name, request.path_params["response_id"])
        raise bad_request(
            "only responses with background=true can be cancelled; close the connection instead"
        )

    async def _prepare(self, call: Call, body: ResponseRequest) -> _PreparedResponse:
        api = self._api
        started_s = time.monotonic()
        model = api.choose_generator(call, body.model)
        _check(body)
        call.ignore((name for name in _HINTS if asks_for_something(getattr(body, name))), NO_EFFECT)
        if body.request_id is not None:
            call.ignore(["request_id"], "what is stored is stored under ids of this server's own")
        given_input = await self._input(call, body)
        prompt = await api.prompts.chat(given_input.conversation)
        token_ids, answer_format = self._truncated(body, prompt), prompt.answer_format
        given = answer_format.constraints(prompt.form, "text.format") | await api.prompts.thinking(
            body.thinking_token_budget, answer_format
        )
        num_prompt = len(token_ids)
        params = await off_loop(
            call.num_body_bytes, lambda: self._params(body, num_prompt, answer_format, given)
        )
        job = GenerationJob(
            token_ids, params, None, body.cache_salt, body.priority, images=prompt.images
        )
        job.keep = retention(body.prompt_cache_retention)
        asked = None
        if body.store is not False:
            asked = await off_loop(
                given_input.conversation.num_body_bytes,
                lambda: AskedInput.of(given_input.items, given_input.messages),
            )
        names = TokenNames(api.client.tokenizer, as_ids=False, shows_special=False)
        seal = (
            partial(self._sealer.seal, call.tenant.name)
            if _SEALED in (body.include or ())
            else None
        )
        return _PreparedResponse(
            body,
            job,
            model,
            given_input.functions,
            asked,
            answer_format,
            names,
            seal,
            time.monotonic() - started_s,
        )

    async def _input(self, call: Call, body: ResponseRequest) -> _Input:
        api = self._api
        offered = await off_loop(
            call.num_body_bytes,
            lambda: read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, RESPONSES),
        )
        forms = _asked_form(body)
        tools = await api.prompts.tools(offered, forms)
        history: list[dict[str, Any]] = []
        num_bytes = call.num_body_bytes
        if body.previous_response_id is not None:
            previous = self._store.get(
                call.tenant.name, body.previous_response_id, param="previous_response_id"
            )
            num_bytes += previous.num_bytes
            history = await off_loop(previous.num_bytes, lambda: previous.messages)
        items, asked = await self._read_input(call, body) if body.input or not history else ([], [])
        messages = [*history, *asked]
        shown = (
            [{"role": "system", "content": body.instructions}, *messages]
            if body.instructions
            else messages
        )
        conversation = Conversation(
            messages=shown,
            tools=tools,
            asked=forms,
            template_kwargs=_effort(body, api.prompts.template_source, call),
            num_body_bytes=num_bytes,
            media_scope=call.tenant.media_scope(body.cache_salt),
        )
        return _Input(conversation, messages, items, list(offered[0]))

    def _truncated(self, body: ResponseRequest, prompt: ChatPrompt) -> list[int]:
        if body.truncation != "auto":
            return prompt.token_ids
        prompts = self._api.prompts
        most = prompts.max_model_len - (body.max_output_tokens or 1)
        if prompt.images and len(prompt.token_ids) > most:
            raise unavailable_feature("truncation", "an input with images cannot be cut")
        return prompts.truncate(prompt.token_ids, most)

    async def _read_input(
        self, call: Call, body: ResponseRequest
    ) -> tuple[list[Item], list[dict[str, Any]]]:
        """Return the input's items, and the same as messages for the template."""
        reader = InputReader(partial(self._sealer.unseal, call.tenant.name))

        def read() -> tuple[list[Item], list[dict[str, Any]]]:
            items = reader.items(body.input)
            return items, for_template(messages_of(items))

        found = await off_loop(call.num_body_bytes, read)
        call.ignore(
            reader.unread,
            "it was sealed by another server, or before this one was started; send its content",
        )
        return found

    def _params(
        self,
        body: ResponseRequest,
        num_prompt_tokens: int,
        answer_format: AnswerFormat,
        given: dict[str, Any],
    ) -> SamplingParams:
        api = self._api
        check_num_logprobs("top_logprobs", body.top_logprobs, api.client.model)
        wants_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
        if wants_logprobs and not answer_format.is_text_only:
            param = "include" if body.top_logprobs is None else "top_logprobs"
            raise unavailable_feature(
                param, "log-probabilities are only given of answers without tools and thoughts"
            )
        num_top = (body.top_logprobs or 0) if wants_logprobs else None
        default = api.default_max_tokens(num_top, 1)
        max_tokens = api.prompts.max_tokens(
            num_prompt_tokens, body.max_output_tokens, default=default, param="max_output_tokens"
        )
        return sampling_params(
            body, api.sampling_defaults, **given, max_tokens=max_tokens, logprobs=num_top
        )

    async def run_body(self, call: Call, body: bytes) -> dict[str, Any]:
        """Return the answer to a body that did not come by HTTP (a batch's line); never a stream,
        and not kept to be continued."""
        request = await read_bytes(call, body, ResponseRequest)
        if request.stream:
            raise bad_request("stream: a batch's line is answered in one piece", param="stream")
        request.store = False
        return await self._create(call, await self._prepare(call, request), None)

    async def _create(
        self, call: Call, prepared: _PreparedResponse, receive: Receive | None
    ) -> dict[str, Any]:
        (output,), usage = await self._api.generator.answer(call, [prepared.job], receive)
        completion = output.outputs[0]
        tracker = prepared.tracker()
        items = prepared.output_items()
        await self._api.prompts.work(
            answer_chars(output),
            lambda: items.take(completion, tracker.take(completion) if tracker is not None else []),
        )
        answer = _body(
            prepared, _status(completion), _usage(usage, items.num_reasoning_tokens), items.items
        )
        prepared.add_timings(answer, output, usage)
        self._keep(call, prepared, answer)
        return answer

    def _keep(self, call: Call, prepared: _PreparedResponse, answer: dict[str, Any]) -> None:
        if prepared.asked is None:
            return
        kept = messages_of([item for item in answer["output"] if is_whole(item)])
        answered = for_template(kept) if kept else []
        self._store.put(call.tenant.name, StoredResponse(answer, prepared.asked, answered))


def _check(body: ResponseRequest) -> None:
    check_common(body)
    for name, reason in _UNAVAILABLE.items():
        if asks_for_something(getattr(body, name)):
            raise unavailable_feature(name, reason)
    unknown = [each for each in body.include or () if each not in _INCLUDABLE]
    if unknown:
        raise bad_request(
            f"include: {unknown[0][:80]!r} is none of {', '.join(_INCLUDABLE)}", param="include"
        )


def _asked_form(body: ResponseRequest) -> list[Asked]:
    """Return the output schema of `text.format`: as a chat's `response_format`, but flat."""
    form = (body.text or {}).get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return from_named_schema(form, "text.format")
    return from_response_format(form, "text.format")


def _effort(body: ResponseRequest, source: str, call: Call) -> dict[str, Any] | None:
    """Return the wished effort of reasoning, for templates that know it."""
    effort = (body.reasoning or {}).get("effort")
    found = effort_kwargs(source, effort) if isinstance(effort, str) else {}
    if found:
        return found
    if asks_for_something(body.reasoning):
        call.ignore(["reasoning"], NOT_IN_TEMPLATE)
    return None


def _status(completion: CompletionOutput) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _body(
    prepared: _PreparedResponse, status: str, usage: dict[str, Any] | None, output: Sequence[Item]
) -> dict[str, Any]:
    """Return OpenAI's response object."""
    request, params = prepared.request, prepared.job.params
    return {
        **({} if request.user is None else {"user": request.user}),
        **({} if usage is None else {"usage": usage}),
        "id": prepared.id,
        "object": "response",
        "created_at": prepared.created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": prepared.model,
        "output": list(output),
        "parallel_tool_calls": True
        if request.parallel_tool_calls is None
        else request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
        "store": request.store is not False,
        "temperature": params.temperature,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_shown(function) for function in prepared.functions],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": request.truncation or "disabled",
        "metadata": request.metadata or {},
        "service_tier": "default",
    }


def _shown(function: Function) -> dict[str, Any]:
    fields = {"name": function.name, "description": function.description}
    return {
        "type": "function",
        **fields,
        "parameters": function.parameters,
        "strict": function.strict,
    }


def _usage(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_cache_write_tokens,
        },
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


class _ResponseEvents:
    """The events of one answer, from `response.created` to
    `response.completed` or `response.incomplete`."""

    def __init__(self, prepared: _PreparedResponse, run: GenerationRun, keep: Any) -> None:
        self._prepared = prepared
        self._run = run
        self._keep = keep
        self._number = 0
        self._last: RequestOutput | None = None
        self._items = prepared.output_items()
        self._tracker = prepared.tracker()

    def take(self, number: int, output: RequestOutput) -> bytes:
        """See `Events`."""
        opening = self._opening() if self._last is None else b""
        self._last = output
        return opening + self._delta(output)

    def end(self) -> bytes:
        """See `Events`."""
        assert self._last is not None, "a run ends with an output"
        return self._closing(self._last)

    def fail(self, error: ApiError) -> bytes:
        """See `Events`."""
        body = _body(self._prepared, "failed", None, [])
        body["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=body)

    def _opening(self) -> bytes:
        prepared = self._prepared
        body = _body(prepared, "in_progress", None, [])
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def _delta(self, output: RequestOutput) -> bytes:
        completion = output.outputs[0]
        tokens = self._tracker.take(completion) if self._tracker is not None else []
        return b"".join(
            self._event(each.kind, **each.fields) for each in self._items.take(completion, tokens)
        )

    def _closing(self, last: RequestOutput) -> bytes:
        usage = self._run.usage
        shown = _usage(usage, self._items.num_reasoning_tokens)
        body = _body(self._prepared, _status(last.outputs[0]), shown, self._items.items)
        self._prepared.add_timings(body, last, usage)
        self._keep(body)
        return self._event(f"response.{body['status']}", response=body)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = named_event(kind, {"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return event
