"""Requests on their way: chosen, sent, sent elsewhere, and answered once.

A request may be sent to another back end as long as no byte of an answer has gone to its client,
and only where that can do no harm: its path computes and stores nothing (`PURE_PATHS`), its method
changes nothing, or the back end was never reached. So no token is ever repeated. What fails later
ends the client's stream with an error event, or its connection, never with what looks complete. A
client that leaves takes its request back from the back end.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from quire.common.http_client import HttpError, HttpRequest
from quire.common.http_head import CHUNKED, body_length, joined, options_of, split
from quire.config.route import RouteConfig
from quire.router.asks import AskReader, Read
from quire.router.fleet import Fleet, Trip
from quire.router.metrics import RouterMetrics
from quire.router.paths import PURE_PATHS, is_forwarded, is_lookup, route_label
from quire.router.prefill import PrefillStage
from quire.router.relay import Relay
from quire.server.http.body import read_body
from quire.server.http.call import call_in
from quire.server.http.errors import ApiError, overloaded
from quire.server.http.responses import WRITER
from quire.server.quota.admission import AdmissionControl

_ECHOING_METHODS = frozenset({"TRACE", "CONNECT"})
"""A back end answers TRACE with the headers it was sent: with the key that the router shows it."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DROPPED = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "proxy-connection", "host", "content-length", "expect",
        "x-request-id", "x-client-request-id",
    }
)  # fmt: skip
"""Headers that are one connection's, or said anew."""
_DROPPED_OF_ANSWERS = _DROPPED | {
    "openai-processing-ms",
    "x-content-type-options",
    "server",
    "date",
}
SECRETS = frozenset({"authorization", "x-api-key"})
_UNAVAILABLE = frozenset({502, 503, 504})
"""Of a back end, or of what stands before it: another one may serve the request."""
_FULL = b'"queue_full"'
"""In the body of a 429 that says nothing of the client's own rate."""
_OUTPUT_TOKENS = re.compile(rb'"(?:completion|output)_tokens": ?(\d{1,9})')
_POLL_S = 0.05
"""How often a request that waits for a back end looks for one."""


class Asked(NamedTuple):
    """A request that is to be forwarded."""

    request: HttpRequest
    read: Read
    may_repeat: bool
    """Whether it may be sent twice, should the first time come to nothing."""
    is_lookup: bool
    """Whether it names something that one of the back ends has."""


class _Refused(Exception):
    """A back end does not serve a request that another one may serve."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.relay = relay


class Forwarder:
    """ASGI application behind the gateway, for every path that is not the router's own."""

    def __init__(
        self,
        config: RouteConfig,
        fleet: Fleet,
        admission: AdmissionControl,
        metrics: RouterMetrics,
        *,
        passes_keys: bool,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._passes_keys = passes_keys
        self._prefill = PrefillStage(config)
        self._reader = AskReader(config.chunk_bytes, config.session_header)
        self.is_draining = False

    @property
    def prefill_outcomes(self) -> dict[str, int]:
        """Prompts that were sent to prefill back ends, by what came of it."""
        return self._prefill.num_by_outcome

    def close(self) -> None:
        """Close the connections to prefill back ends."""
        self._prefill.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ApiError, or ClientDisconnect."""
        if not is_forwarded(scope):
            raise ApiError(404, "there is no such path", code="unknown_url")
        if scope["method"] in _ECHOING_METHODS:
            raise ApiError(405, f"{scope['method']} is not forwarded", code="method_not_allowed")
        if self.is_draining:
            raise overloaded("the router is draining", code="draining", retry_after_s=1, status=503)
        call = call_in(scope)
        scope["route"] = route_label(scope["path"])
        tenant, most = call.tenant, self._config.max_in_flight
        if self._admission.num_in_flight >= most:
            message = f"{most} requests are in flight, and no more may be; try again later"
            raise overloaded(message, code="queue_full", retry_after_s=1)
        asked = await self._read(scope, receive)
        ticket = self._admission.admit(
            tenant, num_sequences=1, num_prompt_tokens=asked.read.ask.num_prompt_tokens
        )
        left_s = max(0.0, (call.deadline_s or 0.0) - time.monotonic())
        delivery = _Delivery(scope, send, self._admission.rate_headers(tenant))
        gone = asyncio.create_task(_departure(receive))
        try:
            async with asyncio.timeout(left_s):
                await self._serve(asked, delivery, gone)
        except TimeoutError:
            if not await delivery.fail("the request took longer than it may", "request_timeout"):
                raise ApiError(
                    504, "the request took longer than it may", code="request_timeout"
                ) from None
        finally:
            gone.cancel()
            self._admission.release(ticket)
            self._admission.charge(tenant, num_output_tokens=delivery.num_pieces)

    async def _read(self, scope: Scope, receive: Receive) -> Asked:
        body = b""
        if scope["method"] not in _SAFE_METHODS:
            config = self._config
            body = await read_body(
                receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
            )
        call, path = call_in(scope), scope["path"]
        headers = joined(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        )
        dropped = _DROPPED | options_of(headers)
        headers = {name: value for name, value in headers.items() if name not in dropped}
        if not self._passes_keys:
            headers = {name: value for name, value in headers.items() if name not in SECRETS}
        if self._config.backend_api_key:
            headers["authorization"] = f"Bearer {self._config.backend_api_key.strip()}"
        headers["x-request-id"] = call.request_id
        query = scope["query_string"].decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        return Asked(
            HttpRequest(scope["method"], target, body, headers),
            self._reader.read(headers, body, call.tenant.name),
            may_repeat=scope["method"] in _SAFE_METHODS or path in PURE_PATHS,
            is_lookup=is_lookup(path, body),
        )

    async def _serve(self, asked: Asked, delivery: _Delivery, gone: asyncio.Task[None]) -> None:
        """Send it to one back end after the other, until one has answered."""
        asked = asked._replace(request=await self._prefilled(asked.request, gone))
        tried: set[str] = set()
        refused: Relay | None = None
        failure: ApiError | None = None
        most = len(self._fleet.replicas) if asked.is_lookup else 1 + self._config.max_retries
        for number in range(max(1, most)):
            trip = await self._choose(asked, tried, gone)
            if trip is None:
                break
            tried.add(trip.replica.name)
            self._metrics.sent(is_retry=number > 0)
            try:
                await self._attempt(asked, trip, delivery, gone)
                return
            except _Refused as error:
                refused = error.relay
            except HttpError as error:
                failure = _error_of(error)
                if delivery.has_begun or not (asked.may_repeat or error.kind == "connect"):
                    break
        if refused is not None and not delivery.has_begun:
            await delivery.begin(refused)
            await delivery.finish(refused)
            return
        failure = failure or self._fleet.none_left()
        if not await delivery.fail(failure.message, failure.code or "backend_failed"):
            raise failure

    async def _prefilled(self, request: HttpRequest, gone: asyncio.Task[None]) -> HttpRequest:
        """Have its prompt computed elsewhere, where that is wished. Raises ClientDisconnect."""
        task = asyncio.create_task(self._prefill.prepare(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            task.cancel()

    async def _choose(self, asked: Asked, tried: set[str], gone: asyncio.Task[None]) -> Trip | None:
        """Wait for a back end, but only for the first: after that, those that are left are asked at
        once. Raises ClientDisconnect."""
        until_s = time.monotonic() + (0.0 if tried else self._config.wait_timeout_s)
        while (trip := self._fleet.send(asked.read.ask, asked.read.model, tried)) is None:
            if gone.done():
                raise ClientDisconnect
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not self._fleet.replicas:
                return None
            await asyncio.sleep(min(_POLL_S, left_s))
        return trip

    async def _attempt(
        self, asked: Asked, trip: Trip, delivery: _Delivery, gone: asyncio.Task[None]
    ) -> None:
        """Raises HttpError, _Refused or ClientDisconnect."""
        relay, fleet, replica = Relay(), self._fleet, trip.replica
        outcome = "cancelled"
        trip.task = task = asyncio.create_task(
            replica.client.relay(asked.request, relay, is_safe=asked.may_repeat)
        )
        for each in (task, gone):
            each.add_done_callback(relay.wake)
        try:
            await self._pump(asked, trip, relay, delivery, gone)
            outcome = "answered"
            replica.breaker.succeed()
        except HttpError as error:
            outcome = "failed"
            fleet.fail(replica, is_certain=error.kind == "connect")
            raise
        except _Refused:
            outcome = "refused"
            if relay.answer is not None and relay.answer.status in _UNAVAILABLE:
                fleet.fail(replica)
            else:
                replica.breaker.succeed()
            raise
        finally:
            if outcome == "cancelled":
                replica.breaker.cancel()
            task.cancel()
            gone.remove_done_callback(relay.wake)
            delivery.num_pieces += relay.num_pieces
            fleet.end(trip, outcome)

    async def _pump(
        self,
        asked: Asked,
        trip: Trip,
        relay: Relay,
        delivery: _Delivery,
        gone: asyncio.Task[None],
    ) -> None:
        """Carry one answer. Bytes of streams pass by here once the client takes them."""
        task = trip.task
        assert task is not None
        started_s = time.monotonic()
        while True:
            await relay.changed.wait()
            relay.changed.clear()
            if gone.done():
                raise ClientDisconnect
            answer, is_over = relay.answer, task.done()
            if is_over:
                _check_exchange(task, trip)
            if answer is None or not (is_over or relay.is_due or delivery.has_begun):
                continue
            if not delivery.has_begun:
                trip.flight.begin_answer()
                self._metrics.first_byte(time.monotonic() - started_s)
                if relay.is_held and _is_refusal(asked, answer.status, relay):
                    raise _Refused(relay)
                await delivery.begin(relay)
            if is_over:
                await delivery.finish(relay)
                return
            await delivery.go_on(relay)


class _Delivery:
    """What has been sent to one client."""

    def __init__(self, scope: Scope, send: Send, rates: dict[str, str]) -> None:
        self._send = send
        self._rates = rates
        self._writer = scope.get("extensions", {}).get(WRITER, {}).get("writer")
        self._relay: Relay | None = None
        self._is_stream = self._has_ended = False
        self.has_begun = False
        self.num_pieces = 0
        """Of streams; a token each, or nearly so. Of other answers the tokens that they report."""

    async def begin(self, relay: Relay) -> None:
        """Send status and headers."""
        answer = relay.answer
        assert answer is not None
        self.has_begun, self._relay = True, relay
        self._is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        dropped = _DROPPED_OF_ANSWERS | options_of(answer.headers)
        headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, values in {**answer.headers, **self._rates}.items()
            if name not in dropped
            for value in split(name, values)
        ]
        length = body_length(answer.headers)
        if length is not None and length != CHUNKED and answer.status != 204:
            headers.append((b"content-length", str(length).encode()))
        await self._send(
            {"type": "http.response.start", "status": answer.status, "headers": headers}
        )

    async def go_on(self, relay: Relay) -> None:
        """Send what has come; after it, bytes may pass by. Never both at once: what waits here for
        a slow client is older than what the relay gets meanwhile.
        """
        relay.write_to(None)
        data = relay.take()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        relay.write_to(self._writer)

    async def finish(self, relay: Relay) -> None:
        """Send what is left, and the end."""
        relay.write_to(None)
        self._has_ended = True
        body = relay.take()
        found = _OUTPUT_TOKENS.search(body) if relay.is_held else None
        if found is not None:
            self.num_pieces = int(found[1])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, message: str, code: str) -> bool:
        """End an answer that has begun: a stream of events with one that says what happened, any
        other by closing the connection. False where none has begun.
        """
        if not self.has_begun:
            return False
        relay = self._relay
        if self._has_ended or relay is None:
            return True
        relay.write_to(None)
        if not self._is_stream:
            raise ClientDisconnect  # the connection closes before the announced end
        data = relay.take()
        event = b"data: " + ApiError(502, message, code=code).encode() + b"\n\n"
        last = b"" if relay.is_done else event if relay.ends_event else b"\n\n" + event
        self._has_ended = True
        await self._send({"type": "http.response.body", "body": data + last, "more_body": False})
        return True


async def _departure(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_exchange(task: asyncio.Task[int], trip: Trip) -> None:
    """Raises what ended an exchange before its time."""
    if task.cancelled():
        assert trip.is_abandoned
        raise HttpError("the back end was given up", kind="broken")
    task.result()


def _is_refusal(asked: Asked, status: int, relay: Relay) -> bool:
    """Return whether another back end may serve what this one does not."""
    if status == 404:
        return asked.is_lookup
    if status == 429:
        return _FULL in relay.held()
    return status == 503 or (status in _UNAVAILABLE and asked.may_repeat)


def _error_of(error: HttpError) -> ApiError:
    """Return what a client is told: never an address."""
    if error.kind == "timeout":
        return ApiError(504, "the back end was silent for too long", code="backend_timeout")
    return ApiError(502, "the back end failed while it served this", code="backend_failed")
