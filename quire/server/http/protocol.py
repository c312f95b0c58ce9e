"""HTTP/1.1 connections with bounds: uvicorn's httptools protocol, read message by message, with the
limits that it leaves open.

The C parser (llhttp) judges every byte; what is decided here is what it gets to see. A request's
head is collected first, within `MAX_HEADER_BLOCK_BYTES` and a deadline, and handed over in one
piece; of a body no more than its length; and of what a client sends ahead nothing before the answer
to the request before has left. So an error is always that of one request, and nothing is ever
parsed that would not be served. What llhttp and uvicorn let pass is refused here: protocols and
versions that are not HTTP/1.0 or 1.1, a missing or second Host, codings besides chunked, trailers
that pose as headers, endless chunk extensions. Errors have OpenAI's shape also where the request
cannot be parsed at all. `exchange.py` owns what leaves.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.config.api import ApiConfig
from quire.server.http.errors import ApiError, overloaded
from quire.server.http.exchange import RequestCycle
from quire.server.http.responses import WRITER

MAX_HEADER_BLOCK_BYTES = 48 << 10
"""Of the request line and headers together, with the line ends before them."""
MAX_CHUNKS = 65536
"""Chunks of one body. A client's JSON comes in one or a few; tiny ones cost a microsecond each."""
MAX_FRAMING_BYTES = 48 << 10
"""Of a chunked body's sizes, extensions and trailers together,
beyond `_CHUNK_FRAMING_BYTES` for each chunk."""
MAX_AHEAD_BYTES = 64 << 10
"""Of what a client sends before it has the answer to its request; more than that is lost, and so is
the connection after the answer.
"""
IDLE_S = 75
"""How long a connection may be idle between two requests."""

_CHUNK_FRAMING_BYTES = 20
"""A size of 16 digits and two line ends."""
_HEAD_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"[\r\n]*([A-Z-]+) ([!-~]+) HTTP/(1\.[01])\r\n")
_BEGINNING = re.compile(rb"[\r\n]*(?:[A-Z-]{1,24}(?: |\Z)|\Z)")
_UPGRADE = re.compile(rb"(?i)\r\nupgrade:[^\r\n]*")


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Subclassed per server, with its `api_config`."""

    api_config = ApiConfig()
    cycle: RequestCycle | None  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn's, which reads on where we do not
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)
        self._held = b""
        """What has come and was not parsed: an unfinished head, or what was sent ahead."""
        self._is_deaf = False
        """Whether nothing more is read: the connection ends with the answer under way."""
        self._is_in_head = self._is_in_body = self._keeps_alive = False
        self._has_served = False
        """Whether there has been a request."""
        self._body_left: int | None = None
        """Bytes of the body that are to come; None where it says so itself, chunk by chunk."""
        self._num_chunks = self._num_framing_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request; refuse a connection too many."""
        super().connection_made(transport)
        _send_at_once(transport)
        if len(self.connections) > self.api_config.max_connections:
            self._refuse(
                overloaded(
                    "too many connections", code="too_many_connections", retry_after_s=1, status=503
                )
            )
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers and what was held."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._held = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come as far as it belongs to the request that is due."""
        if self._is_deaf or self.transport.is_closing():
            return
        self._read(self._held + data if self._held else data)

    def on_response_complete(self) -> None:
        """Go on with what was sent ahead."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._read(self._held)

    def _read(self, data: bytes) -> None:
        self._held = b""
        while data and not self._is_deaf:
            if self._is_in_body:
                data = self._read_body(data)
            elif self._is_answering:
                self._hold(data)
                break
            else:
                data = self._read_head(data)
        if not self.transport.is_closing():
            self._set_clocks()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _hold(self, data: bytes) -> None:
        """Keep what was sent ahead. Reading goes on meanwhile,
        so that a client that leaves is noticed."""
        if len(data) > MAX_AHEAD_BYTES:
            self._end_after_answer()
        else:
            self._held = data

    def _read_head(self, data: bytes) -> bytes:
        """Begin an exchange where the head is complete; what lies behind it."""
        begin = len(data) - len(data.lstrip(b"\r\n"))
        end = data.find(_HEAD_END, begin)
        if (end if end >= 0 else len(data)) > MAX_HEADER_BLOCK_BYTES:
            self._refuse(
                ApiError(431, "the request's headers are too large", code="headers_too_large")
            )
        elif end >= 0:
            end += len(_HEAD_END)
            self._begin(data[:end])
            return data[end:]
        elif _is_hopeless(data, begin):
            self._refuse(_invalid())  # at once: a TLS client, say, would wait for the deadline
        else:
            self._held = data
        return b""

    def _begin(self, head: bytes) -> None:
        line = _REQUEST_LINE.match(head)
        if line is None:
            self._refuse(_invalid())
            return
        try:
            self._parse_head(head)
            self._start(self._scope(*line.groups()))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(_invalid())

    def _parse_head(self, head: bytes) -> None:
        """Raises HttpParserError, or HttpParserUpgrade of CONNECT."""
        try:
            self._feed_head(head)
        except httptools.HttpParserUpgrade:
            # Ignored, as a server may. llhttp would take the request's body for the other
            # protocol's bytes.
            self.parser = httptools.HttpRequestParser(self)
            self._feed_head(_UPGRADE.sub(b"", head))

    def _feed_head(self, head: bytes) -> None:
        self._is_in_head = True
        self.parser.feed_data(head)
        if self._is_in_head:
            raise httptools.HttpParserError("a head without its end")

    def _scope(self, method: bytes, target: bytes, version: bytes) -> dict[str, Any]:
        """Return what ASGI says of a request. The path is as it was sent:
        that of `http://x/livez` is not `/livez`."""
        raw_path, _, query = target.partition(b"?")
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version.decode("ascii"),
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": method.decode("ascii"),
            "root_path": self.root_path,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }

    def _start(self, scope: Any) -> None:
        """Begin an exchange. Raises HttpParserError where llhttp is
        content with a head that is not."""
        fields, is_current = dict(self.headers), scope["http_version"] == "1.1"
        _check_fields(self.headers, is_current=is_current)
        self._body_left = (
            None if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0))
        )
        self._num_chunks = self._num_framing_bytes = 0
        cycle = RequestCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=is_current
            and fields.get(b"expect", b"").lower() == b"100-continue",
            keep_alive=is_current and self._keeps_alive,
            on_response=self.on_response_complete,
        )
        cycle.write_timeout_s = self.api_config.write_timeout_s
        scope["extensions"] = {WRITER: {"writer": cycle.writer}}
        cycle.more_body = self._is_in_body
        if not cycle.more_body:
            cycle.message_event.set()
        self.cycle, self._has_served = cycle, True
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _read_body(self, data: bytes) -> bytes:
        """Feed what belongs to the body; what lies behind it."""
        mine = data
        if self._body_left is not None:
            mine = data[: self._body_left]
            self._body_left -= len(mine)
        self._num_framing_bytes += len(mine)  # less what turns out to be the body's
        try:
            self.parser.feed_data(mine)
            if self._body_left == 0 and self._is_in_body:
                raise httptools.HttpParserError("a body of another length")
        except httptools.HttpParserError:
            if self._is_in_body:
                self._break_off()
            else:  # a request behind a chunked body: it may be sent again on another connection
                self._end_after_answer()
        else:
            if (
                self._num_framing_bytes
                > MAX_FRAMING_BYTES + _CHUNK_FRAMING_BYTES * self._num_chunks
            ):
                self._break_off()  # also where all of it has come at once
        return data[len(mine) :]

    def on_message_begin(self) -> None:
        """Heads are fed on their own, so that a second one can only come behind a chunked body."""
        if not self._is_in_head:
            raise httptools.HttpParserError("a second request")
        self.headers = []
        self._is_in_body = True

    def on_url(self, url: bytes) -> None:
        """Take the request line."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped: they come after everything has been decided."""
        if self._is_in_head:
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Note what llhttp forgets at a message's end."""
        self._is_in_head = False
        self._keeps_alive = self.parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        """Count a chunk."""
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            raise httptools.HttpParserError("too many chunks")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; it is dropped where the answer did not wait for it."""
        self._num_framing_bytes -= len(body)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.waiting_for_100_continue = False
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """End the request: it is complete."""
        self._is_in_body = False
        if self.cycle is not None:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def _end_after_answer(self) -> None:
        """Listen no more, and close when the answer under way has left."""
        self._is_deaf = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _break_off(self) -> None:
        """End a body that cannot be parsed. Inside a response no error can be sent any more."""
        cycle = self.cycle
        self._is_deaf = True
        if cycle is None or cycle.response_started:
            self.transport.close()
        else:
            self._refuse(_invalid())
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _set_clocks(self) -> None:
        """Set the deadlines: a head must come in time, and so must the rest of a body whose answer
        did not wait for it. Between two requests there is more of it.
        """
        self._unset_keepalive_if_required()
        if self._is_answering:
            self._stop_timer()
        elif self._held or self._is_in_body or not self._has_served:
            if self._header_timer is None:
                self._start_timer()
        else:
            self._stop_timer()
            # clients keep hundreds of connections that do nothing
            self.cycle, self.headers = None, []
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.api_config.header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        """Close a connection whose headers did not arrive in time."""
        self._header_timer = None
        if self._is_in_body:
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(
                ApiError(408, "the request's headers did not arrive in time", code="header_timeout")
            )

    def _refuse(self, error: ApiError) -> None:
        """Answer without an application, and close."""
        self._stop_timer()
        self._is_deaf = True
        body = error.encode()
        lines = [
            f"HTTP/1.1 {error.status} Error",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        lines += [f"x-request-id: req_{secrets.token_hex(12)}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in error.headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def _is_hopeless(data: bytes, begin: int) -> bool:
    """Return whether an unfinished head, whose request line is at `begin`, can never become one."""
    line_end = data.find(b"\n", begin)
    return _BEGINNING.match(data) is None or (
        line_end > 0 and data[line_end - 1 : line_end] != b"\r"
    )


def _check_fields(headers: list[tuple[bytes, bytes]], *, is_current: bool) -> None:
    """Raises HttpParserError for what a request of HTTP/1.1 (`is_current`)
    or 1.0 must not be without or have."""
    num_hosts = sum([name == b"host" for name, _ in headers])
    if num_hosts > 1 or (is_current and num_hosts == 0):
        raise httptools.HttpParserError("not one Host")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    # llhttp looks at the last line alone
    if codings and (codings != [b"chunked"] or not is_current):
        raise httptools.HttpParserError("a coding that is not chunked")


def _invalid() -> ApiError:
    return ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http")


def _send_at_once(transport: asyncio.Transport) -> None:
    """Switch Nagle's algorithm off. asyncio does so only where the listening socket names its
    protocol, which one made by `socket.create_server` does not; each answer, and each token of a
    stream, would then wait 40 ms for the client's ACK.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def protocol_for(config: ApiConfig) -> type[BoundedProtocol]:
    """Return the protocol class of one server."""
    return type("ConfiguredProtocol", (BoundedProtocol,), {"api_config": config})


def uvicorn_config(app: Any, config: ApiConfig, **options: Any) -> uvicorn.Config:
    """uvicorn's settings for `app`; `options` say where to listen.
    Nothing is read from the environment or from proxies."""
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
