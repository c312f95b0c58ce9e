"""HTTP/1.1 connections with bounds: uvicorn's h11 protocol, with the limits that it leaves open.

What is added: a deadline for a request's headers (a connection that sends nothing, or a byte now and then, is closed), a bound
on connections and on chunks of a chunked body, and errors in OpenAI's shape also where the request cannot be parsed at all.
h11 itself refuses malformed framing and header blocks above `MAX_HEADER_BLOCK_BYTES`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any

import h11
import uvicorn
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from quire.config.api import ApiConfig
from quire.server.errors import ApiError, overloaded
from quire.server.responses import WRITER

MAX_HEADER_BLOCK_BYTES = 48 << 10
"""Of the request line and headers together, and of any chunk's header."""
MAX_CHUNKS = 65536
"""Chunks of one body. A client's JSON comes in one or a few; tiny ones cost h11 microseconds each."""
IDLE_S = 75
"""How long a connection may be idle between two requests."""


class _BoundedConnection(h11.Connection):
    """Counts a body's chunks."""

    _num_data = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_data = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._num_data += 1
            if self._num_data > MAX_CHUNKS:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class _Sender:
    """How one exchange's answer leaves: in place of uvicorn's `send`, with a deadline for clients that take nothing.

    A piece of a chunked body is framed here: h11 keeps no state between two of them, and its way costs a third of what a
    streamed token costs this process. The head and the end of the body are h11's.
    """

    __slots__ = ("_cycle", "_is_chunked", "_plain", "_timeout_s")

    def __init__(self, cycle: RequestResponseCycle, timeout_s: float) -> None:
        self._cycle = cycle
        self._plain = cycle.send
        self._timeout_s = timeout_s
        self._is_chunked = False

    def can_write(self) -> bool:
        """See `Writer`."""
        cycle = self._cycle
        return self._is_chunked and not cycle.flow.write_paused and not cycle.disconnected

    def write(self, body: bytes) -> None:
        """See `Writer`: one more chunk."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    async def __call__(self, message: Any) -> None:
        """ASGI's `send`. Raises ClientDisconnect where the client has not taken anything within the limit."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await cycle.flow.drain()
            except TimeoutError:
                raise ClientDisconnect from None
        if self._is_chunked and message.get("more_body") and message["type"] == "http.response.body":
            if message["body"] and not cycle.disconnected:
                self.write(message["body"])
            return
        if message["type"] == "http.response.start":
            self._is_chunked = self._will_be_chunked(message)
        await self._plain(message)

    def _will_be_chunked(self, message: Any) -> bool:
        """As h11 decides it."""
        has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
        is_bodiless = message["status"] in (204, 304) or self._cycle.scope["method"] == "HEAD"
        return not has_length and not is_bodiless and self._cycle.scope["http_version"] == "1.1"


class BoundedProtocol(H11Protocol):
    """One connection. Subclassed per server, with its `api_config`."""

    api_config = ApiConfig()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _BoundedConnection(h11.SERVER, MAX_HEADER_BLOCK_BYTES)
        self._header_timer: asyncio.TimerHandle | None = None
        self._cycle_seen: object | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request; refuse a connection too many."""
        super().connection_made(transport)
        _send_at_once(transport)
        if len(self.connections) > self.api_config.max_connections:
            error = overloaded("too many connections", code="too_many_connections", retry_after_s=1, status=503)
            self._refuse(error)
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """As uvicorn, which makes an exchange here whenever a request's head is complete."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not None and self.cycle is not before:
            sender = _Sender(self.cycle, self.api_config.write_timeout_s)
            self.cycle.send = sender  # type: ignore[method-assign]
            self.cycle.scope["extensions"] = {WRITER: {"writer": sender}}

    def data_received(self, data: bytes) -> None:
        """Headers must be complete in time from their first byte on."""
        if self.transport.is_closing():
            return
        is_between = self.cycle is None or self.cycle.response_complete
        if is_between and self._header_timer is None:
            self._start_timer()
        super().data_received(data)
        if self.cycle is not self._cycle_seen:
            self._cycle_seen = self.cycle
            self._stop_timer()
        elif is_between and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._await_next()  # that was the rest of a body whose answer did not wait for it

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed as HTTP. Inside a response nothing can be said any more; the connection is closed."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.transport.close()
            return
        self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http"))

    def _await_next(self) -> None:
        """The connection is idle."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.api_config.header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        """The headers did not arrive in time."""
        self._header_timer = None
        if not self.transport.is_closing():
            self._refuse(ApiError(408, "the request's headers did not arrive in time", code="header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer by hand and close: h11's own state may be beyond answering."""
        self._stop_timer()
        body = error.encode()
        lines = [f"HTTP/1.1 {error.status} Error", "content-type: application/json", f"content-length: {len(body)}"]
        lines += [f"x-request-id: req_{secrets.token_hex(12)}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in error.headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def _send_at_once(transport: asyncio.Transport) -> None:
    """Switch Nagle's algorithm off. asyncio does so only where the listening socket names its protocol, which one made by
    `socket.create_server` does not; each answer, and each token of a stream, would then wait 40 ms for the client's ACK."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def protocol_for(config: ApiConfig) -> type[BoundedProtocol]:
    """The protocol class of one server."""
    return type("ConfiguredProtocol", (BoundedProtocol,), {"api_config": config})


def uvicorn_config(app: Any, config: ApiConfig, **options: Any) -> uvicorn.Config:
    """uvicorn's settings for `app`; `options` say where to listen. Nothing is read from the environment or from proxies."""
    return uvicorn.Config(
        app,
        http=protocol_for(config),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        root_path="",
        timeout_keep_alive=IDLE_S,
        **options,
    )
