"""One streamed request as its client sees it: when it was due, sent, answered, and when each piece
of the answer came.

Owns the request bodies of OpenAI's two endpoints and the reading of their events. Knows no rates
and no statistics.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.bench.serving.dataset import ServeRequest
from quire.common.event_reader import EventReader
from quire.common.http_client import HttpClient, HttpError, HttpRequest, HttpResponse

OK = "ok"
_DONE = b"[DONE]"
_MAX_ERROR_CHARS = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    """Of a model without a tokenizer, which has no text to stream, if the body has
    `return_token_ids`."""
    delta: _Delta | None = None
    finish_reason: str | None = None


class _TokenCounts(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _TokenCounts | None = None
    error: Any = None


@dataclass(slots=True)
class RequestTimeline:
    """What was seen of one request; times on `time.perf_counter()`'s clock,
    relative to the run's start once it is over."""

    due_s: float
    """When it was to be sent."""
    sent_s: float = 0.0
    end_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """When each event with text came: one a token, from a server that does not merge them."""
    status: str = ""
    """"ok"; an HTTP status; "connect", "broken", "timeout", "protocol",
    "stream_error" or "truncated"."""
    error: str = ""
    num_prompt: int | None = None
    num_output: int = 0
    """By the server's usage; without it, events."""

    @property
    def is_ok(self) -> bool:
        """Whether it was answered to its end."""
        return self.status == OK

    @property
    def ttft_s(self) -> float:
        """From sending to the first text."""
        return self.token_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.num_output < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_output - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how."""

    client: HttpClient
    model: str | None
    is_chat: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request, on top of the usual ones; a value of null takes a usual one away."""

    def encode(self, request: ServeRequest) -> HttpRequest:
        """Return the whole HTTP request."""
        body: dict[str, Any] = {"model": self.model} if self.model is not None else {}
        if self.is_chat:
            messages = (
                request.messages
                if request.messages is not None
                else [{"role": "user", "content": request.prompt}]
            )
            body["messages"] = messages
        else:
            body["prompt"] = request.prompt
        body |= {"max_tokens": request.num_output, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= self.body
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        data = json.dumps(
            {name: value for name, value in body.items() if value is not None}
        ).encode()
        return HttpRequest("POST", path, data, {"content-type": "application/json"})

    async def exchange(self, request: ServeRequest, seen: RequestTimeline) -> None:
        """Ask, and note in `seen` what comes back. Raises nothing for what a server does."""
        encoded = self.encode(request)
        reader = _TimelineReader(seen)
        seen.sent_s = time.perf_counter()
        try:
            answer = await self.client.request(encoded, EventReader(reader))
        except HttpError as error:
            seen.status, seen.error = error.kind, str(error)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            seen.status, seen.error = (
                "protocol",
                f"an event is not what OpenAI's API sends: {error}"[:_MAX_ERROR_CHARS],
            )
        else:
            reader.conclude(answer)
        seen.end_s = time.perf_counter()


_decoder = msgspec.json.Decoder(_Event)


class _TimelineReader:
    """Takes the events of one stream."""

    __slots__ = ("_finish_s", "_has_ended", "_seen")

    def __init__(self, seen: RequestTimeline) -> None:
        self._seen = seen
        self._has_ended = False
        self._finish_s: float | None = None

    def __call__(self, data: bytes) -> None:
        seen = self._seen
        if data == _DONE:
            self._has_ended = True
            return
        event = _decoder.decode(data)
        if event.error is not None:
            seen.status, seen.error = "stream_error", json.dumps(event.error)[:_MAX_ERROR_CHARS]
            return
        if event.usage is not None:
            seen.num_prompt, seen.num_output = (
                event.usage.prompt_tokens,
                event.usage.completion_tokens,
            )
        now = time.perf_counter()
        if any(map(_has_text, event.choices)):
            seen.token_s.append(now)
        if any(choice.finish_reason is not None for choice in event.choices):
            self._finish_s = now

    def conclude(self, answer: HttpResponse) -> None:
        """Judge the answer, which is over."""
        seen = self._seen
        if seen.status:
            return
        if not 200 <= answer.status < 300:
            seen.status = str(answer.status)
            seen.error = answer.body[:_MAX_ERROR_CHARS].decode(errors="replace")
        elif not self._has_ended:
            seen.status, seen.error = "truncated", "the stream ended without [DONE]"
        elif not seen.token_s and self._finish_s is None:
            seen.status, seen.error = "stream_error", "the answer holds nothing"
        else:
            seen.status = OK
            if not seen.token_s and self._finish_s is not None:  # tokens without a text
                seen.token_s.append(self._finish_s)
            seen.num_output = seen.num_output or len(seen.token_s)


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text or choice.token_ids)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
