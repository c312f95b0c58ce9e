"""POST /v1/completions, the older form: raw prompts, as text or as token ids, one or many."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.core.params import SamplingParams
from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.server.api.generation import GenerationJob, GenerationRun, Usage
from quire.server.api.openai.chat import stream_error, usage_body
from quire.server.api.openai.fields import (
    NO_EFFECT,
    SamplingFields,
    TopLogprobs,
    asks_for_something,
    check_fields,
    check_num_logprobs,
    ignored_hints,
    sampling_params,
)
from quire.server.api.openai.logprobs import (
    LogprobTracker,
    ScoredToken,
    TokenNames,
    legacy_logprobs,
    prompt_logprobs,
)
from quire.server.api.openai.shapes import ResponseFormat
from quire.server.api.retention import retention
from quire.server.api.structure import from_guided, from_response_format, settle
from quire.server.http.body import read_bytes, read_json, shape
from quire.server.http.call import Call, call_of
from quire.server.http.errors import ApiError, bad_request, unavailable_feature
from quire.server.http.off_loop import SMALL, off_loop
from quire.server.http.responses import (
    DONE,
    EventStream,
    TextEvent,
    answer_chars,
    data_event,
    json_response,
    timings,
)
from quire.server.quota.cost import check_sequences
from quire.server.state import Api

DEFAULT_MAX_TOKENS = 16
MAX_BEST_OF = 20

_T = TypeVar("_T")
Prompt = str | list[int]
PromptField = str | list[Any]
"""A text, token ids, or a list of either; checked by hand,
since msgspec cannot tell the lists apart."""


class CompletionRequest(SamplingFields, kw_only=True):
    """The body."""

    prompt: PromptField
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    logprobs: TopLogprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_BEST_OF)] | None = None
    suffix: str | None = None
    response_format: Annotated[Any, shape(ResponseFormat)] = None


@dataclass(slots=True)
class PreparedCompletion:
    """A checked request, ready to run."""

    request: CompletionRequest
    jobs: list[GenerationJob]
    texts: list[str]
    """The prompts' texts, where they are echoed; else empty ones."""
    model: str
    fingerprint: str
    names: TokenNames
    prepare_s: float
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_scoring(self) -> bool:
        """Whether only the prompt is wanted: `max_tokens=0` with `echo`.
        One token is made and dropped."""
        return self.request.max_tokens == 0

    def timings(self, output: RequestOutput, num_tokens: int) -> dict[str, Any]:
        """Return where one prompt's time went."""
        return timings(output.metrics, prepare_s=self.prepare_s, num_output_tokens=num_tokens)

    def envelope(self) -> dict[str, Any]:
        """Return the fields of every answer and chunk."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return OpenAI's `usage` so far."""
        if self.is_scoring:
            usage.num_output_tokens = 0
        return usage_body(usage)


class Completions:
    """The endpoint."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def post(self, request: Request) -> Response:
        """Answer, in one piece or as a stream."""
        call = call_of(request)
        body = await read_json(request, CompletionRequest, is_strict=self._api.config.strict_fields)
        prepared = await self.prepare(call, body)
        if not body.stream:
            return await self._create(
                call, prepared, request.receive, lambda answer: json_response(call, answer)
            )
        run = await self._api.generator.start(call, prepared.jobs, is_stream=True)
        return EventStream(
            call, run, _CompletionEvents(prepared, run), self._api.config.keep_alive_s
        )

    async def prepare(self, call: Call, body: CompletionRequest) -> PreparedCompletion:
        """Check everything and encode the prompts. Raises ApiError or a RequestError."""
        api = self._api
        started_s = time.monotonic()
        model = api.choose_generator(call, body.model)
        _check(body)
        check_num_logprobs("logprobs", body.logprobs, api.client.model)
        call.ignore(ignored_hints(body), NO_EFFECT)
        most = api.config.max_prompts
        prompts = await off_loop(call.num_body_bytes, lambda: split_prompts(body.prompt, most))
        if body.kv_transfer_params and len(prompts) > 1:
            raise bad_request(
                f"kv_transfer_params: they are one prompt's, and {len(prompts)} are given",
                param="kv_transfer_params",
            )
        check_sequences(
            api.config, len(prompts), len(prompts) * (body.best_of or body.n or 1), "prompt"
        )
        params = await self._params(call, body)
        encoded = await self._encode(body, prompts)
        size = sum(map(len, encoded)) + SMALL * len(prompts) // 16
        jobs, texts = await off_loop(
            size, lambda: self._jobs(body, params, list(zip(prompts, encoded, strict=True)))
        )
        names = TokenNames(
            api.client.tokenizer,
            as_ids=bool(body.return_tokens_as_token_ids),
            shows_special=body.skip_special_tokens is False,
        )
        prepare_s = time.monotonic() - started_s
        prepared = PreparedCompletion(
            body, jobs, texts, model, api.fingerprint_of(call), names, prepare_s
        )
        if body.request_id is not None:
            prepared.id = f"cmpl-{body.request_id}"
        return prepared

    async def _params(self, call: Call, body: CompletionRequest) -> SamplingParams:
        """Return what the body says of all its prompts, read once;
        their limit of tokens is what it wants at most."""
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = -1 if -1 in (body.logprobs, scored) else max(body.logprobs, scored or 0)
        given: dict[str, Any] = {
            "max_tokens": wanted,
            "logprobs": body.logprobs,
            "prompt_logprobs": scored,
        }
        given["structured_outputs"] = await settle(
            [*from_response_format(body.response_format), *from_guided(body)]
        )
        given |= await self._api.prompts.thinking(body.thinking_token_budget)
        if body.max_tokens == 0:
            given |= {"min_tokens": 0, "stop": None}
        defaults = self._api.sampling_defaults
        return await off_loop(
            call.num_body_bytes,
            lambda: sampling_params(body, defaults, **{"best_of": body.best_of, **given}),
        )

    async def _encode(self, body: CompletionRequest, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return every prompt's token ids, in order."""
        written = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(
            await self._api.prompts.encode_many(
                written, add_special_tokens=body.add_special_tokens is not False
            )
        )
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _jobs(
        self,
        body: CompletionRequest,
        params: SamplingParams,
        prompts: Sequence[tuple[Prompt, list[int]]],
    ) -> tuple[list[GenerationJob], list[str]]:
        """Return one job for each prompt and its ids, and the texts that are echoed."""
        made = [self._job(body, params, *each) for each in prompts]
        return [job for job, _ in made], [text for _, text in made]

    def _job(
        self, body: CompletionRequest, params: SamplingParams, prompt: Prompt, token_ids: list[int]
    ) -> tuple[GenerationJob, str]:
        prompts = self._api.prompts
        kept = prompts.truncate(token_ids, body.truncate_prompt_tokens, body.truncation_side)
        if not kept:
            raise bad_request("prompt: it is empty; give at least one token", param="prompt")
        wanted = params.max_tokens
        if body.max_tokens is None and wanted is not None:
            wanted = min(wanted, max(1, prompts.max_model_len - len(kept)))
        max_tokens = prompts.max_tokens(len(kept), wanted, default=None, param="max_tokens")
        prompts.check_ids(kept, "prompt")  # which are no more than the context holds, by now
        text = ""
        if body.echo:
            text = (
                prompt if isinstance(prompt, str) and kept is token_ids else prompts.text_of(kept)
            )
        num_choices = body.n or 1
        num_repeated = num_choices * (len(text) + (len(kept) if body.return_token_ids else 0))
        job = GenerationJob(
            kept,
            params.limited(max_tokens),
            None,
            body.cache_salt,
            body.priority,
            num_choices,
            num_repeated,
            keep=retention(body.prompt_cache_retention),
        )
        return job, text

    async def run_body(self, call: Call, body: bytes) -> dict[str, Any]:
        """Return the answer to a body that did not come by HTTP (a batch's line); never a
        stream."""
        request = await read_bytes(call, body, CompletionRequest)
        if request.stream:
            raise bad_request("stream: a batch's line is answered in one piece", param="stream")
        return await self._create(
            call, await self.prepare(call, request), None, lambda answer: answer
        )

    async def _create(
        self,
        call: Call,
        prepared: PreparedCompletion,
        receive: Receive | None,
        shown: Callable[[dict[str, Any]], _T],
    ) -> _T:
        """Return the whole answer, as `shown` makes it."""
        outputs, usage = await self._api.generator.answer(call, prepared.jobs, receive)
        body = prepared.usage(usage)
        size = sum(map(answer_chars, outputs))
        return await self._api.prompts.work(size, lambda: shown(_answer(prepared, outputs, body)))


def split_prompts(prompt: PromptField, most: int, param: str = "prompt") -> list[Prompt]:
    """Return one entry per prompt. Raises ApiError 400 for what is neither text nor token ids,
    and for more than `most` of them."""
    if isinstance(prompt, str):
        return [_nonempty(prompt, param)]
    if not prompt:
        raise bad_request(f"{param}: the list is empty", param=param, code="empty_array")
    if _are_ids(prompt):
        return [prompt]
    if len(prompt) > most:
        raise bad_request(
            f"{param}: {len(prompt)} prompts are given; one request may have {most} prompts",
            param=param,
        )
    prompts: list[Prompt] = []
    for number, each in enumerate(prompt):
        is_ids = isinstance(each, list) and each and _are_ids(each)
        if not isinstance(each, str) and not is_ids:
            where = f"{param}[{number}]"
            raise bad_request(
                f"{where}: a prompt is a text or a list of token ids, and not empty", param=where
            )
        prompts.append(_nonempty(each, f"{param}[{number}]") if isinstance(each, str) else each)
    return prompts


def _are_ids(values: list[Any]) -> bool:
    """Return whether all are integers (True is none): four million of them in a twentieth of a
    second."""
    return set(map(type, values)) == {int}


def _nonempty(prompt: str, param: str) -> str:
    if not prompt:
        raise bad_request(f"{param}: it is empty; give at least one character", param=param)
    return prompt


def _check(body: CompletionRequest) -> None:
    check_fields(body)
    if asks_for_something(body.tools):
        raise unavailable_feature("tools", "tools are for chats; use /v1/chat/completions")
    if body.suffix:
        raise unavailable_feature("suffix", "this model was not trained to fill in the middle")
    if body.logprob_token_ids and body.logprobs is None:
        raise bad_request("logprob_token_ids: only with logprobs", param="logprob_token_ids")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request(
            "max_tokens: 0 is possible only with echo=true; give at least 1", param="max_tokens"
        )
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise bad_request(f"best_of: {body.best_of} is less than n={body.n}", param="best_of")
        if body.stream and body.best_of > (body.n or 1):
            raise bad_request(
                "best_of: the best are known at the end only; not with stream=true", param="best_of"
            )


# -- the answer in one piece
# ---------------------------------------------------------------------------------------------


def _answer(
    prepared: PreparedCompletion, outputs: Sequence[RequestOutput], usage: dict[str, Any]
) -> dict[str, Any]:
    request = prepared.request
    num_choices = request.n or 1
    choices = []
    for number, output in enumerate(outputs):
        echo = _Echo(prepared, number, output)
        for completion in sorted(output.outputs, key=lambda each: each.index):
            choices.append(_choice(echo, completion, number * num_choices + completion.index))
    answer = {**prepared.envelope(), "choices": choices, "usage": usage}
    if outputs[0].kv_transfer_params is not None:
        answer["kv_transfer_params"] = outputs[0].kv_transfer_params
    if request.timings:
        counts = [sum(len(each.token_ids) for each in output.outputs) for output in outputs]
        answer["timings"] = [prepared.timings(*each) for each in zip(outputs, counts, strict=True)]
    return answer


class _Echo:
    """One prompt, as far as it is part of the answer:
    its text and its tokens' log-probabilities before the output's."""

    def __init__(self, prepared: PreparedCompletion, number: int, output: RequestOutput) -> None:
        self.prepared = prepared
        self.number = number
        self.output = output
        self.text = prepared.texts[number]
        request = prepared.request
        self.tokens: list[ScoredToken] = []
        if request.echo and request.logprobs is not None and output.prompt_logprobs is not None:
            scorer = self._tracker(request.logprobs, 0)
            self.tokens = [
                scorer.score(token_id, record)
                for token_id, record in zip(
                    output.prompt_token_ids, output.prompt_logprobs, strict=True
                )
            ]

    @cached_property
    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """As vLLM shows them, made once for all choices."""
        return prompt_logprobs(self.output.prompt_logprobs)

    def tracker(self) -> LogprobTracker | None:
        """Return the tracker of one choice's own tokens."""
        count = self.prepared.request.logprobs
        return (
            None
            if count is None
            else self._tracker(count, len(self.text) if self.prepared.request.echo else 0)
        )

    def _tracker(self, count: int, first_offset: int) -> LogprobTracker:
        asked = self.prepared.request.logprob_token_ids or ()
        return LogprobTracker(
            self.prepared.names, count, first_offset, asked=asked, counts_sampled=False
        )

    def logprobs(self, tokens: Sequence[ScoredToken], *, has_prompt: bool) -> dict[str, Any] | None:
        """Return OpenAI's four lists."""
        if self.prepared.request.logprobs is None:
            return None
        shown = [*self.tokens, *tokens] if has_prompt else list(tokens)
        return legacy_logprobs(shown, is_first_unknown=has_prompt and bool(self.tokens))


def _choice(echo: _Echo, completion: CompletionOutput, index: int) -> dict[str, Any]:
    prepared = echo.prepared
    request = prepared.request
    tracker = echo.tracker()
    tokens = tracker.take(completion) if tracker is not None and not prepared.is_scoring else []
    choice: dict[str, Any] = {
        "index": index,
        "text": echo.text + ("" if prepared.is_scoring else completion.text),
        "logprobs": echo.logprobs(tokens, has_prompt=True),
        "finish_reason": "length" if prepared.is_scoring else completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "prompt_logprobs": None if request.prompt_logprobs is None else echo.prompt_logprobs,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    if request.return_token_ids:
        choice["prompt_token_ids"] = echo.output.prompt_token_ids
        choice["token_ids"] = [] if prepared.is_scoring else completion.token_ids
    return choice


# -- the stream
# --------------------------------------------------------------------------------------------------


class _CompletionEvents:
    """The events of all prompts as their outputs come, then `[DONE]`."""

    def __init__(self, prepared: PreparedCompletion, run: GenerationRun) -> None:
        options = prepared.request.stream_options
        self._prepared = prepared
        self._run = run
        self._has_usage = bool(options and options.include_usage)
        self.has_running_usage = self._has_usage and bool(
            options and options.continuous_usage_stats
        )
        self._envelope = prepared.envelope()
        self._prompts: dict[int, _ChoiceStreams] = {}
        self._num_tokens = 0
        """Of the events so far, while the run may be ahead of them."""

    def take(self, number: int, output: RequestOutput) -> bytes:
        """See `Events`."""
        prompt = self._prompts.get(number)
        if prompt is None:
            prompt = self._prompts[number] = _ChoiceStreams(
                self, _Echo(self._prepared, number, output)
            )
        return b"".join([prompt.event(completion, output) for completion in output.outputs])

    def end(self) -> bytes:
        """See `Events`."""
        if not self._has_usage:
            return DONE
        return data_event({**self._envelope, "choices": [], "usage": self._usage()}) + DONE

    def fail(self, error: ApiError) -> bytes:
        """See `Events`."""
        return stream_error(error)

    def event(self, choice: dict[str, Any], **more: Any) -> bytes:
        """Return one choice's event."""
        chunk = {**self._envelope, "choices": [choice], **more}
        if self._has_usage:
            chunk["usage"] = self._usage() if self.has_running_usage else None
        return data_event(chunk)

    def count(self, num_tokens: int) -> None:
        """Count further tokens of the events."""
        self._num_tokens += num_tokens

    def _usage(self) -> dict[str, Any]:
        return self._prepared.usage(replace(self._run.usage, num_output_tokens=self._num_tokens))


class _ChoiceStreams:
    """The choices of one prompt while they are streamed."""

    def __init__(self, events: _CompletionEvents, echo: _Echo) -> None:
        self._events = events
        self._prepared = echo.prepared
        self._echo = echo
        request = self._prepared.request
        count = request.n or 1
        self._first_index = echo.number * count
        self._trackers = [self._echo.tracker() for _ in range(count)]
        has_more = bool(request.return_token_ids) or request.logprobs is not None
        self._is_plain = not (has_more or self._prepared.is_scoring or events.has_running_usage)
        """Whether a choice's events differ by their text alone,
        once it has begun and until it ends."""
        self._texts: dict[int, TextEvent] = {}
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._num_tokens = 0

    def event(self, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """Return the event of what is new of a choice; empty if nothing is."""
        self._num_tokens += len(completion.token_ids)
        self._events.count(len(completion.token_ids))
        if completion.finish_reason is None:
            text = self._texts.get(completion.index)
            if text is not None:
                return text.around(completion.text) if completion.text else b""
        choices = self._of(completion, output)
        more: dict[str, Any] = {}
        if (
            self._prepared.request.timings
            and choices
            and output.finished
            and len(self._ended) == len(self._trackers)
        ):
            more["timings"] = self._prepared.timings(output, self._num_tokens)
        return b"".join([self._events.event(choice, **more) for choice in choices])

    def _of(self, completion: CompletionOutput, output: RequestOutput) -> list[dict[str, Any]]:
        prepared, index = self._prepared, completion.index
        if index in self._ended:
            return []
        request, tracker = prepared.request, self._trackers[index]
        is_first = index not in self._begun
        self._begun.add(index)
        if self._is_plain:
            self._texts[index] = TextEvent(partial(self._text_event, index))
        has_prompt = is_first and bool(request.echo)
        text = (self._echo.text if has_prompt else "") + (
            "" if prepared.is_scoring else completion.text
        )
        tokens = tracker.take(completion) if tracker is not None and not prepared.is_scoring else []
        ids = completion.token_ids if request.return_token_ids and not prepared.is_scoring else []
        is_end = completion.finish_reason is not None
        if not text and not tokens and not ids and not is_end:
            return []
        choice: dict[str, Any] = {
            "index": self._first_index + index,
            "text": text,
            "logprobs": self._echo.logprobs(tokens, has_prompt=has_prompt),
            "finish_reason": None,
        }
        if is_first and request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._echo.prompt_logprobs
        if request.return_token_ids:
            choice["token_ids"] = ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if is_end:
            self._ended.add(index)
            choice["finish_reason"] = "length" if prepared.is_scoring else completion.finish_reason
            choice["stop_reason"] = completion.stop_reason
        return [choice]

    def _text_event(self, index: int, text: str) -> bytes:
        return self._events.event(
            {
                "index": self._first_index + index,
                "text": text,
                "logprobs": None,
                "finish_reason": None,
            }
        )
