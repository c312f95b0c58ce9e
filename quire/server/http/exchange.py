"""How one exchange's answer leaves a connection: framed here, in as few writes as can be, with a
deadline for clients that take nothing.

Owns the head and the framing of answers. In place of uvicorn's `send`, which writes head and body
apart (two packets for a short answer), sends chunks to HTTP/1.0, and waits for its client without
end. Reading is `protocol.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_BODILESS = (204, 304)


class ChunkWriter:
    """The `Writer` of an exchange: a piece of a chunked body, straight onto the transport."""

    __slots__ = ("_flow", "_transport", "is_chunked")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self.is_chunked = False
        """Whether a chunked answer is under way."""

    def can_write(self) -> bool:
        """See `Writer`."""
        return self.is_chunked and not self._flow.write_paused and not self._transport.is_closing()

    def write(self, body: bytes) -> None:
        """See `Writer`: one more chunk."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def write_frame(self, data: bytes) -> None:
        """Write one more chunk that has its frame."""
        self._transport.write(data)


class RequestCycle(RequestResponseCycle):
    """One request and its answer, on one connection."""

    write_timeout_s = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writer = ChunkWriter(self.transport, self.flow)
        self._head = b""
        """Kept until the body begins."""
        self._is_bodiless = False
        self._bytes_left: int | None = None
        """Of a body whose length was announced."""

    async def send(self, message: Any) -> None:
        """ASGI's `send`. Raises ClientDisconnect where the client has not taken
        anything within the limit."""
        if self.flow.write_paused and not self.disconnected:
            try:
                async with asyncio.timeout(self.write_timeout_s):
                    await self.flow.drain()
            except TimeoutError:
                raise ClientDisconnect from None
        if self.disconnected:
            return
        is_start = message["type"] == "http.response.start"
        if is_start == self.response_started or self.response_complete:
            raise RuntimeError(f"{message['type']} is out of order")
        if is_start:
            self._begin(message["status"], message.get("headers", ()))
        else:
            self._go_on(message.get("body", b""), is_last=not message.get("more_body", False))

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Make the head. Names are lower case, as ASGI wants them."""
        self.response_started = True
        self.waiting_for_100_continue = False
        lines, length = [_status_line(status)], None
        for name, value in (*self.default_headers, *headers):
            if name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                continue
            if name == b"content-length":
                length = int(value)
            lines.append(b"%b: %b" % (name, value))
        self._is_bodiless = status in _BODILESS or self.scope["method"] == "HEAD"
        self._bytes_left = length
        if length is None and not self._is_bodiless and self.scope["http_version"] == "1.1":
            self.writer.is_chunked = True
            lines.append(b"transfer-encoding: chunked")
        if not self.keep_alive:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        if head.count(b"\n") >= len(lines) or head.count(b"\r") >= len(lines) or b"\0" in head:
            raise RuntimeError("a header's value holds a line end or a NUL")
        self._head = head + b"\r\n\r\n"

    def _go_on(self, body: bytes, *, is_last: bool) -> None:
        if self._is_bodiless:
            body, self._bytes_left = b"", None
        elif self.writer.is_chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (
                b"0\r\n\r\n" if is_last else b""
            )
        elif self._bytes_left is not None:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (is_last and self._bytes_left > 0):
                raise RuntimeError("the body is not as long as was announced")
        if self._head or body:
            self.transport.write(self._head + body)
            self._head = b""
        if is_last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


@cache
def _status_line(status: int) -> bytes:
    try:
        return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()
    except ValueError:
        return f"HTTP/1.1 {status} ".encode()
