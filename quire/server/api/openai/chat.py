"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.server.api.answer_format import AnswerFormat
from quire.server.api.conversation import Conversation
from quire.server.api.generation import GenerationJob, GenerationRun, Usage
from quire.server.api.openai.deltas import ChoiceReader
from quire.server.api.openai.fields import (
    NO_EFFECT,
    Count,
    SamplingFields,
    TopLogprobs,
    check_fields,
    check_num_logprobs,
    ignored_hints,
    sampling_params,
)
from quire.server.api.openai.logprobs import LogprobTracker, TokenNames, prompt_logprobs
from quire.server.api.openai.messages import Message, check_continuation, for_template
from quire.server.api.openai.shapes import ChatTool, ResponseFormat, ToolChoice
from quire.server.api.openai.tools import CHAT, read_tools
from quire.server.api.prompt_encoder import NOT_IN_TEMPLATE, effort_kwargs
from quire.server.api.retention import retention
from quire.server.api.structure import from_guided, from_response_format
from quire.server.http.body import read_bytes, read_json, shape
from quire.server.http.call import Call, call_of
from quire.server.http.errors import ApiError, bad_request, unavailable_feature
from quire.server.http.off_loop import off_loop
from quire.server.http.responses import (
    DONE,
    EventStream,
    TextEvent,
    answer_chars,
    data_event,
    json_response,
    timings,
)
from quire.server.state import Api
from quire.text.template_needs import joined_text

MAX_DOCUMENTS = 1024


class ChatRequest(SamplingFields, kw_only=True):
    """The body."""

    messages: list[Message]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: Annotated[Any, shape(ResponseFormat)] = None
    tools: list[Annotated[Any, shape(ChatTool)]] | None = None
    tool_choice: Annotated[Any, shape(ToolChoice)] = None
    modalities: list[Literal["text", "audio"]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool | None = None
    """None is True, unless the last message is continued."""
    continue_final_message: bool | None = None
    draft_runs: bool | None = None
    """A stream's chunks say which characters of their text came of draft tokens."""


@dataclass(slots=True)
class PreparedChat:
    """A checked request, ready to run, and what its answers have in common."""

    request: ChatRequest
    job: GenerationJob
    model: str
    fingerprint: str
    names: TokenNames
    prepare_s: float
    answer_format: AnswerFormat
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str) -> dict[str, Any]:
        """Return the fields of every answer and chunk."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def reader(self) -> ChoiceReader:
        """Return a reader of one choice."""
        return ChoiceReader(
            self.answer_format, shows_reasoning=self.request.include_reasoning is not False
        )

    def tracker(self) -> LogprobTracker | None:
        """Log-probabilities of one choice, where they are wanted."""
        request = self.request
        if not request.logprobs:
            return None
        return LogprobTracker(
            self.names, request.top_logprobs or 0, asked=request.logprob_token_ids or ()
        )


class ChatCompletions:
    """The endpoint."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def post(self, request: Request) -> Response:
        """Answer a chat, in one piece or as a stream."""
        call = call_of(request)
        body = await read_json(request, ChatRequest, is_strict=self._api.config.strict_fields)
        prepared = await self.prepare(call, body)
        if not body.stream:
            output, usage = await self._generate(call, prepared, request.receive)
            return await self._api.prompts.work(
                answer_chars(output), lambda: json_response(call, _answer(prepared, output, usage))
            )
        run = await self._api.generator.start(call, [prepared.job], is_stream=True)
        return EventStream(call, run, _ChatEvents(prepared, run), self._api.config.keep_alive_s)

    async def prepare(self, call: Call, body: ChatRequest) -> PreparedChat:
        """Check everything and encode the prompt. Raises ApiError or a RequestError."""
        api = self._api
        started_s = time.monotonic()
        model = api.choose_generator(call, body.model)
        _check(body)
        check_num_logprobs("top_logprobs", body.top_logprobs, api.client.model)
        call.ignore(ignored_hints(body), NO_EFFECT)
        size = call.num_body_bytes
        prompt = await api.prompts.chat(await self._conversation(call, body))
        if prompt.images and body.truncate_prompt_tokens is not None:
            raise unavailable_feature("truncate_prompt_tokens", "a chat with images cannot be cut")
        token_ids = api.prompts.truncate(
            prompt.token_ids, body.truncate_prompt_tokens, body.truncation_side
        )
        if not token_ids:
            raise bad_request("messages: the prompt is empty", param="messages")
        is_newer = body.max_completion_tokens is not None
        param = "max_completion_tokens" if is_newer else "max_tokens"
        wanted = body.max_completion_tokens if is_newer else body.max_tokens
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        num_others = (
            len(body.logprob_token_ids) if body.logprobs and body.logprob_token_ids else num_top
        )
        default = api.default_max_tokens(num_others, body.n or 1)
        max_tokens = api.prompts.max_tokens(len(token_ids), wanted, default=default, param=param)
        given: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": num_top}
        given |= prompt.answer_format.constraints(prompt.form, "response_format")
        given |= await api.prompts.thinking(body.thinking_token_budget, prompt.answer_format)
        params = await off_loop(size, lambda: sampling_params(body, api.sampling_defaults, **given))
        num_repeated = (body.n or 1) * len(echoed_text(body)) + (
            len(token_ids) if body.return_token_ids else 0
        )
        echoed = prompt.text if body.echo else None
        job = GenerationJob(
            token_ids,
            params,
            echoed,
            body.cache_salt,
            body.priority,
            num_repeated=num_repeated,
            images=prompt.images,
            keep=retention(body.prompt_cache_retention),
        )
        names = TokenNames(
            api.client.tokenizer,
            as_ids=bool(body.return_tokens_as_token_ids),
            shows_special=not params.skip_special_tokens,
        )
        prepare_s = time.monotonic() - started_s
        prepared = PreparedChat(
            body, job, model, api.fingerprint_of(call), names, prepare_s, prompt.answer_format
        )
        if body.request_id is not None:
            prepared.id = f"chatcmpl-{body.request_id}"
        return prepared

    async def _conversation(self, call: Call, body: ChatRequest) -> Conversation:
        size = call.num_body_bytes
        messages = await off_loop(size, lambda: for_template(body.messages))
        offered = await off_loop(
            size, lambda: read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, CHAT)
        )
        asked = [*from_response_format(body.response_format), *from_guided(body)]
        return Conversation(
            messages=messages,
            tools=await self._api.prompts.tools(offered, asked),
            asked=asked,
            add_generation_prompt=body.add_generation_prompt is not False,
            is_continued=bool(body.continue_final_message),
            template_kwargs=_template_kwargs(body, self._api.prompts.template_source, call),
            documents=body.documents or None,
            num_body_bytes=size,
            media_scope=call.tenant.media_scope(body.cache_salt),
        )

    async def run_body(self, call: Call, body: bytes) -> dict[str, Any]:
        """Return the answer to a body that did not come by HTTP (a batch's line); never a
        stream."""
        request = await read_bytes(call, body, ChatRequest)
        if request.stream:
            raise bad_request("stream: a batch's line is answered in one piece", param="stream")
        prepared = await self.prepare(call, request)
        output, usage = await self._generate(call, prepared, None)
        return await self._api.prompts.work(
            answer_chars(output), lambda: _answer(prepared, output, usage)
        )

    async def _generate(
        self, call: Call, prepared: PreparedChat, receive: Receive | None
    ) -> tuple[RequestOutput, Usage]:
        (output,), usage = await self._api.generator.answer(call, [prepared.job], receive)
        return output, usage


def _check(body: ChatRequest) -> None:
    check_fields(body, exempt=frozenset({"documents"}))
    if body.modalities is not None and "audio" in body.modalities:
        raise unavailable_feature("modalities", "this model gives text alone")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: only with logprobs=true", param="top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise bad_request("logprob_token_ids: only with logprobs=true", param="logprob_token_ids")
    if body.continue_final_message and body.messages and body.messages[-1].role != "assistant":
        raise bad_request(
            "continue_final_message: the last message must be the assistant's",
            param="continue_final_message",
        )
    check_continuation(body.add_generation_prompt, body.continue_final_message)


def _template_kwargs(body: ChatRequest, source: str, call: Call) -> dict[str, Any] | None:
    """Return what the template gets besides the messages;
    a reasoning effort reaches those that know it."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        found = effort_kwargs(source, body.reasoning_effort)
        kwargs = {**found, **kwargs}
        if not found:
            call.ignore(["reasoning_effort"], NOT_IN_TEMPLATE)
    return kwargs or None


# -- the answer in one piece
# ---------------------------------------------------------------------------------------------


def usage_body(usage: Usage, num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_cache_write_tokens,
            "audio_tokens": 0,
            "image_tokens": usage.num_image_tokens,
        },
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.num_accepted_tokens,
            "rejected_prediction_tokens": usage.num_rejected_tokens,
        },
    }


def _answer(prepared: PreparedChat, output: RequestOutput, usage: Usage) -> dict[str, Any]:
    request = prepared.request
    answer = prepared.envelope("chat.completion")
    completions = sorted(output.outputs, key=lambda each: each.index)
    readers = [prepared.reader() for _ in completions]
    answer["choices"] = [
        _choice(prepared, *each) for each in zip(completions, readers, strict=True)
    ]
    answer["usage"] = usage_body(usage, sum(reader.num_reasoning_tokens for reader in readers))
    answer["service_tier"] = None if request.service_tier is None else "default"
    answer["prompt_logprobs"] = (
        None if request.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)
    )
    answer["prompt_token_ids"] = output.prompt_token_ids if request.return_token_ids else None
    if output.kv_transfer_params is not None:
        answer["kv_transfer_params"] = output.kv_transfer_params
    if request.timings:
        answer["timings"] = timings(
            output.metrics, prepare_s=prepared.prepare_s, num_output_tokens=usage.num_output_tokens
        )
    return answer


def _choice(
    prepared: PreparedChat, completion: CompletionOutput, reader: ChoiceReader
) -> dict[str, Any]:
    tracker = prepared.tracker()
    logprobs = None
    if tracker is not None:
        logprobs = {
            "content": [token.encoded for token in tracker.take(completion)],
            "refusal": None,
        }
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "annotations": [],
    }
    message |= reader.message(completion.text, completion.token_ids)
    echoed = echoed_text(prepared.request)
    if echoed:
        message["content"] = echoed + (message["content"] or "")
    choice: dict[str, Any] = {
        "index": completion.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": reader.finish_reason(completion.finish_reason),
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids if prepared.request.return_token_ids else None,
    }
    return choice


def echoed_text(request: ChatRequest) -> str:
    """Return, with `echo`, the last message where the answer goes on with it."""
    if not request.echo or not request.messages:
        return ""
    last = for_template(request.messages[-1:])[0]
    return joined_text(last["content"]) if request.continue_final_message else ""


# -- the stream
# --------------------------------------------------------------------------------------------------


class _ChatEvents:
    """The events of one chat completion, `[DONE]` included."""

    def __init__(self, prepared: PreparedChat, run: GenerationRun) -> None:
        self._prepared = prepared
        self._run = run
        self._envelope = prepared.envelope("chat.completion.chunk")
        request = prepared.request
        options = request.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._has_running_usage = self._has_usage and bool(
            options and options.continuous_usage_stats
        )
        self._trackers = [prepared.tracker() for _ in range(request.n or 1)]
        self._readers = [prepared.reader() for _ in self._trackers]
        has_more = (
            bool(request.return_token_ids)
            or bool(request.draft_runs)
            or self._trackers[0] is not None
            or not prepared.answer_format.is_text_only
        )
        self._is_plain = not (has_more or self._has_running_usage)
        """Whether a choice's events differ by their text alone until it ends."""
        self._texts: dict[int, TextEvent] = {}
        self._is_begun = False
        self._ended: set[int] = set()
        self._num_tokens = 0
        """Of the events so far, while the run may be ahead of them."""

    def take(self, number: int, output: RequestOutput) -> bytes:
        """See `Events`."""
        opening = b"" if self._is_begun else b"".join(map(data_event, self._opening(output)))
        self._is_begun = True
        return opening + b"".join(
            [self._events(completion, output) for completion in output.outputs]
        )

    def end(self) -> bytes:
        """See `Events`."""
        return data_event(self._chunk([], usage=self._usage())) + DONE if self._has_usage else DONE

    def fail(self, error: ApiError) -> bytes:
        """See `Events`."""
        return stream_error(error)

    def _opening(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the role of every choice, in order of index: the clients' accumulators rely on
        that, and on its being sent once."""
        text = echoed_text(self._prepared.request)
        opening = [
            self._delta(index, {"role": "assistant", "content": text})
            for index in range(len(self._trackers))
        ]
        if self._prepared.request.return_token_ids:
            opening[0]["prompt_token_ids"] = output.prompt_token_ids
        if self._prepared.request.prompt_logprobs is not None:
            opening[0]["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return opening

    def _events(self, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """Return the events of what is new of a choice; empty if nothing is."""
        self._num_tokens += len(completion.token_ids)
        if self._is_plain and completion.finish_reason is None:
            return self._text_event(completion.index, completion.text) if completion.text else b""
        if completion.index in self._ended:
            return b""
        chunks = list(self._content(completion))
        if completion.finish_reason is not None:
            self._ended.add(completion.index)
            end = self._end(completion, output)
            # so that each chunk counts more tokens than the one before
            if self._has_running_usage and chunks:
                end["choices"][0] = {**chunks.pop()["choices"][0], **_told(end["choices"][0])}
            chunks.append(end)
        return b"".join(map(data_event, chunks))

    def _text_event(self, index: int, text: str) -> bytes:
        event = self._texts.get(index)
        if event is None:
            event = self._texts[index] = TextEvent(
                lambda text: data_event(self._delta(index, {"content": text}))
            )
        return event.around(text)

    def _content(self, completion: CompletionOutput) -> Sequence[dict[str, Any]]:
        """Return what is new of one choice; nothing while its text is held back."""
        tracker = self._trackers[completion.index]
        tokens = tracker.take(completion) if tracker is not None else []
        has_ids = bool(self._prepared.request.return_token_ids and completion.token_ids)
        reader, is_last = self._readers[completion.index], completion.finish_reason is not None
        deltas = reader.deltas(completion.text, completion.token_ids, is_last=is_last)
        if not deltas and not tokens and not has_ids:
            return []
        logprobs = (
            {"content": [token.encoded for token in tokens], "refusal": None}
            if tracker is not None
            else None
        )
        first, *others = deltas or [{"content": ""}]
        chunks = [self._delta(completion.index, first, logprobs=logprobs)]
        if has_ids:
            chunks[0]["choices"][0]["token_ids"] = completion.token_ids
        if self._prepared.request.draft_runs and first.get("content") == completion.text:
            chunks[0]["choices"][0]["draft_runs"] = completion.drafted
        return chunks + [self._delta(completion.index, each) for each in others]

    def _end(self, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        reason = self._readers[completion.index].finish_reason(completion.finish_reason)
        chunk = self._delta(completion.index, {}, finish_reason=reason)
        chunk["choices"][0]["stop_reason"] = completion.stop_reason
        if (
            self._prepared.request.timings
            and output.finished
            and len(self._ended) == len(self._trackers)
        ):
            chunk["timings"] = timings(
                output.metrics,
                prepare_s=self._prepared.prepare_s,
                num_output_tokens=self._run.usage.num_output_tokens,
            )
        return chunk

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk([choice], usage=self._usage() if self._has_running_usage else None)

    def _usage(self) -> dict[str, Any]:
        usage = replace(self._run.usage, num_output_tokens=self._num_tokens)
        return usage_body(usage, sum(reader.num_reasoning_tokens for reader in self._readers))

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self._envelope, "choices": choices}
        if self._has_usage:
            chunk["usage"] = usage
        return chunk


def _told(end: dict[str, Any]) -> dict[str, Any]:
    """Return what only a choice's end says."""
    return {name: end[name] for name in ("finish_reason", "stop_reason")}


def stream_error(error: ApiError) -> bytes:
    """Return the last events of a stream that failed."""
    return data_event(error.body()) + DONE
