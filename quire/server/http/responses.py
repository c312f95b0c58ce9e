"""Answers: JSON in one piece, and streams of server-sent events over a run."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.common.failures import log_failure
from quire.core.request import CacheMiss, RequestMetrics
from quire.engine.front.outputs import RequestOutput
from quire.server.api.generation import GenerationRun
from quire.server.http.call import Call
from quire.server.http.errors import ApiError, from_exception
from quire.server.http.off_loop import off_loop

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keepalive\n\n"
"""A comment: clients' event decoders skip it. Never an event of its own,
which they would try to parse."""
DONE = b"data: [DONE]\n\n"
WRITER = "quire.writer"
"""The ASGI extension in which a connection offers its `EventWriter`, as "writer"."""
_PLACEHOLDER = secrets.token_hex(16)
"""A client that names a model cannot guess it."""
_encode = msgspec.json.Encoder().encode
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


_MAX_ROUND_BYTES = 256 << 10
"""Events that are made in one turn of the event loop,
of what has gathered while the client was slow."""


def answer_chars(output: RequestOutput) -> int:
    """About how much there is to write down of an output, log-probabilities above all."""
    num_entries = sum(len(record) for each in output.outputs for record in each.logprobs or ())
    num_entries += sum(len(record) for record in output.prompt_logprobs or () if record is not None)
    num_chars = sum(len(each.text) + 8 * len(each.token_ids) for each in output.outputs)
    return 100 * num_entries + num_chars + 8 * len(output.prompt_token_ids)


class StreamEvent(NamedTuple):
    """One event with a name, before it is written down."""

    kind: str
    fields: dict[str, Any]


def json_response(call: Call, body: Any) -> Response:
    """Return a complete answer."""
    return Response(
        _encode(body), headers={"content-type": "application/json", **call.response_headers()}
    )


def data_event(body: Any) -> bytes:
    """Return an event without a name, as OpenAI's completions send them."""
    return b"data: " + _encode(body) + b"\n\n"


def named_event(name: str, body: Any) -> bytes:
    """Return an event with a name, as OpenAI's responses and Anthropic's messages send them."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(body) + b"\n\n"


class TextEvent:
    """An event in which nothing changes but one text: encoded once,
    so that a token costs no more than its own text."""

    __slots__ = ("_after", "_before")

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make` encodes the event around a text, as a JSON string."""
        self._before, self._after = make(_PLACEHOLDER).split(_encode(_PLACEHOLDER))

    def around(self, text: str) -> bytes:
        """Return what `make` would give for `text`."""
        return b"".join((self._before, _encode(text), self._after))


class Events(Protocol):
    """What an endpoint makes of a run: its events, encoded,
    in the order in which they are to be sent."""

    def take(self, number: int, output: RequestOutput) -> bytes:
        """Return the events of the next output of job `number`;
        empty where there is nothing to show yet."""
        ...

    def end(self) -> bytes:
        """Return the last events, after every output has been taken."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        ...


class EventWriter(Protocol):
    """A way for events past ASGI: straight into a connection that takes them at once,
    without waking a task."""

    def can_write(self) -> bool:
        """Return whether the connection takes more now; if not,
        only ASGI's `send` may wait until it does."""
        ...

    def write(self, body: bytes) -> None:
        """Write a piece of the body."""
        ...


class EventStream(Response):
    """A stream of events over a run. The head is sent with the first event, so an error before it
    is a plain HTTP error; an error after it is the last event. However it ends, the run is closed.

    Where the connection has an `EventWriter`, an output becomes bytes on the wire in the very call
    that brings it, as long as the client takes them; the task here wakes for all else: the end, an
    error, silence, a client that reads slowly.
    """

    def __init__(self, call: Call, run: GenerationRun, events: Events, keep_alive_s: float) -> None:
        super().__init__()
        self._call = call
        self._run = run
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._sent_s = time.monotonic()
        """When something was last sent."""
        self._has_ended = False
        self._begun: set[int] = set()
        """Jobs of which something was taken."""
        self._writer: EventWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        self._run.watch(receive)
        try:
            first = await self._next()
            headers: Mapping[str, str] = {**_STREAM_HEADERS, **self._call.response_headers()}
            fields = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": fields})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            self._writer = scope.get("extensions", {}).get(WRITER, {}).get("writer")
            await self._serve_rest(send)
        finally:
            await self._run.close()

    async def _serve_rest(self, send: Send) -> None:
        try:
            while events := await self._next():
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except ClientDisconnect:
            raise
        except Exception as error:
            answer = from_exception(error)
            if not isinstance(error, ApiError):
                log_failure(
                    logger, f"request {self._call.request_id} failed while it was streamed", error
                )
            if answer.status == 499:
                raise ClientDisconnect from None
            await send(
                {"type": "http.response.body", "body": self._events.fail(answer), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes:
        """Return what is to be sent next, beside what `_pass_on` sends meanwhile;
        nothing after the end."""
        run = self._run
        pass_on = None if self._writer is None else self._pass_on
        while not run.is_over:
            item = await run.get(self._sent_s + self._keep_alive_s - time.monotonic(), pass_on)
            parts, num_bytes = [], 0
            while item is not None:
                parts.append(await self._events_of(*item))
                num_bytes += len(parts[-1])
                if num_bytes > _MAX_ROUND_BYTES:  # the others' turn
                    await asyncio.sleep(0)
                    break
                item = run.take()
            events = b"".join(parts)
            now = time.monotonic()
            if not events and now >= self._sent_s + self._keep_alive_s:
                events = KEEP_ALIVE
            if events:
                self._sent_s = now
                return events
        is_last, self._has_ended = not self._has_ended, True
        return self._events.end() if is_last else b""

    async def _events_of(self, number: int, output: RequestOutput) -> bytes:
        """Return an output's events; those of a job's first one, which may show a whole prompt,
        are made beside the event loop."""
        size = 0 if number in self._begun else answer_chars(output)
        self._begun.add(number)
        return await off_loop(size, lambda: self._events.take(number, output))

    def _pass_on(self, number: int, output: RequestOutput) -> bool:
        """Send an output's events from within the call that brings it; False where the client is
        not ready for more, and for a job's first one.
        """
        writer = self._writer
        if writer is None or not writer.can_write() or number not in self._begun:
            return False
        events = self._events.take(number, output)
        if events:
            writer.write(events)
            self._sent_s = time.monotonic()
        return True


def timings(metrics: RequestMetrics, *, prepare_s: float, num_output_tokens: int) -> dict[str, Any]:
    """Return where a request's time went, in milliseconds, why it waited, and why its prompt was
    not found in the cache."""

    def span_ms(start_s: float | None, end_s: float | None) -> float | None:
        return (
            None if start_s is None or end_s is None else round(1000 * max(0.0, end_s - start_s), 3)
        )

    decode_ms = span_ms(metrics.first_token_s, metrics.last_token_s)
    rate = (
        1000 * (num_output_tokens - 1) / decode_ms if decode_ms and num_output_tokens > 1 else None
    )
    return {
        "prepare_ms": round(1000 * prepare_s, 3),
        "queue_ms": span_ms(metrics.arrival_s, metrics.first_scheduled_s),
        "queue_steps": metrics.num_waited_steps,
        "queue_reason": _queue_reason(metrics),
        "prefill_ms": span_ms(metrics.first_scheduled_s, metrics.first_token_s),
        "first_token_ms": span_ms(metrics.arrival_s, metrics.first_token_s),
        "decode_ms": decode_ms,
        "total_ms": span_ms(metrics.arrival_s, metrics.finished_s or metrics.last_token_s),
        "tokens_per_second": rate if rate is None else round(rate, 3),
        "cached_tokens": metrics.num_prefix_hit_tokens,
        "cache_write_tokens": metrics.num_cache_write_tokens,
        "prompt_cache_diagnostics": _cache_diagnostics(metrics.cache_miss),
        "weight_versions": list(metrics.weight_versions),
        "prefill_chunks": metrics.num_prefill_chunks,
        "preemptions": metrics.num_preemptions,
        "detokenize_ms": round(1000 * metrics.detokenize_s, 3),
    }


def _cache_diagnostics(miss: CacheMiss | None) -> dict[str, Any]:
    """Say why whole blocks of a prompt were computed, and how many tokens that cost; the types are
    those of OpenAI's responses."""
    if miss is None:
        return {"type": "unavailable"}
    if not miss.reason:
        return {"type": "cache_hit"}
    return {
        "type": "cache_miss",
        "reason": miss.reason,
        "cache_missed_tokens": miss.num_tokens,
        "evicted_tokens": miss.num_evicted_tokens,
    }


def _queue_reason(metrics: RequestMetrics) -> str | None:
    """Return why steps were planned without it; None where it was in the first that it could be
    in."""
    if metrics.waited_for is not None:
        return metrics.waited_for
    return "others before it in the order of service" if metrics.num_waited_steps > 0 else None
