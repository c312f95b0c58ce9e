"""Answers: JSON in one piece, and streams of server-sent events over a run."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.common.failures import log_failure
from quire.core.request import RequestMetrics
from quire.server.call import Call
from quire.server.errors import ApiError, from_exception
from quire.server.generation import Run

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keepalive\n\n"
"""A comment: clients' event decoders skip it. Never an event of its own, which they would try to parse."""
DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class StreamEvent(NamedTuple):
    """One event with a name, before it is written down."""

    kind: str
    fields: dict[str, Any]


def json_response(call: Call, body: Any, status: int = 200) -> Response:
    """A complete answer."""
    return Response(msgspec.json.encode(body), status, headers={"content-type": "application/json", **call.response_headers()})


def data_event(body: Any) -> bytes:
    """An event without a name, as OpenAI's completions send them."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(name: str, body: Any) -> bytes:
    """An event with a name, as OpenAI's responses and Anthropic's messages send them."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """A stream of events over a run. The head is sent with the first event, so an error before it is a plain HTTP error;
    an error after it is the last event. However it ends, the run is closed."""

    def __init__(
        self, call: Call, run: Run, events: AsyncGenerator[bytes, None], on_error: Callable[[ApiError], bytes]
    ) -> None:
        super().__init__()
        self._call = call
        self._run = run
        self._events = events
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        self._run.watch(receive)
        try:
            first = await anext(self._events, b"")
            headers: Mapping[str, str] = {**_STREAM_HEADERS, **self._call.response_headers()}
            fields = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": fields})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            await self._serve_rest(send)
        finally:
            await self._events.aclose()
            await self._run.close()

    async def _serve_rest(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except ClientDisconnect:
            raise
        except Exception as error:
            answer = from_exception(error)
            if not isinstance(error, ApiError):
                log_failure(logger, f"request {self._call.request_id} failed while it was streamed", error)
            if answer.status == 499:
                raise ClientDisconnect from None
            await send({"type": "http.response.body", "body": self._on_error(answer), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def timings(metrics: RequestMetrics, *, prepare_s: float, num_output_tokens: int) -> dict[str, float | int | str | None]:
    """Where a request's time went, in milliseconds, and why it waited."""

    def span_ms(start_s: float | None, end_s: float | None) -> float | None:
        return None if start_s is None or end_s is None else round(1000 * max(0.0, end_s - start_s), 3)

    decode_ms = span_ms(metrics.first_token_s, metrics.last_token_s)
    rate = 1000 * (num_output_tokens - 1) / decode_ms if decode_ms and num_output_tokens > 1 else None
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
        "prefill_chunks": metrics.num_prefill_chunks,
        "preemptions": metrics.num_preemptions,
        "detokenize_ms": round(1000 * metrics.detokenize_s, 3),
    }


def _queue_reason(metrics: RequestMetrics) -> str | None:
    """Why steps were planned without it; None where it was in the first that it could be in."""
    if metrics.waited_for is not None:
        return metrics.waited_for
    return "others before it in the order of service" if metrics.num_waited_steps > 0 else None
