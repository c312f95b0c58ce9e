"""A lean HTTP/1.1 client for asyncio: what measuring a server and talking to one need, and nothing
else.

Owns its connections (kept open between requests) and their deadlines. A body can be handed to a
sink piece by piece, from within the read itself: no task is woken for a piece, which is what keeps
a client of hundreds of streams cheap. Never follows redirects, never uses a proxy, never
decompresses, never keeps cookies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from quire.common.http_head import CHUNKED, body_length, options_of, parse_head
from quire.common.lookup import addresses_of
from quire.common.watch_clock import counted_timeout, looking_clock
from quire.errors import ConfigError, QuireError

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 256 << 20
"""Of a body that is collected, not handed on."""
_MAX_CHUNK_LINE = 4096
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_NO_BODY = (204, 304)
_MAX_SIZE_LEN = 12
"""Of the line before a chunk that is handed on as it is."""
_READ_BYTES = 64 << 10
_MAX_IDLE = 1024
"""Connections to one server that are kept open."""

Sink = Callable[[bytes], None]


class Valve(Protocol):
    """What stops an answer for a while."""

    def pause(self) -> None:
        """Read no more until `resume`. Silence is not counted meanwhile."""
        ...

    def resume(self) -> None:
        """Read on."""
        ...


class Receiver(Protocol):
    """What takes an answer as it comes, whatever its status. All of it is called from within the
    read: it must be quick, and what it raises ends the request."""

    def head(self, answer: HttpResponse, valve: Valve) -> None:
        """Take status and headers, once, before any piece."""
        ...

    def piece(self, data: bytes) -> None:
        """Take a piece of the body."""
        ...

    def frame(self, data: bytes, start: int) -> None:
        """Take a piece that came alone, as it was framed: one chunk, whose content is from `start`
        to before the last two bytes."""
        ...

    def flush(self) -> None:
        """Note that no more pieces have come for now."""
        ...


class HttpError(QuireError):
    """A server cannot be reached, breaks off, is silent for too long, or does not speak HTTP."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
        """"connect", "broken", "timeout" or "protocol"."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and the path below which its API lies."""

    host: str
    port: int
    path: str
    is_secure: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse `http://host:port/prefix`; a missing scheme is http. Raises ConfigError."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from None
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"{url!r} has no valid port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigError(f"{url!r} must be scheme, host, port and path alone")
        if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
            raise ConfigError(f"the path of {url!r} holds characters that must be percent-encoded")
        if port == 0:
            raise ConfigError(f"{url!r} has port 0, on which no server is")
        is_secure = parts.scheme == "https"
        return cls(
            parts.hostname, port or (443 if is_secure else 80), parts.path.rstrip("/"), is_secure
        )

    @property
    def netloc(self) -> str:
        """`host:port`, as in a Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True)
class HttpResponse:
    """A response: its body is empty where a sink took it. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What to ask. `headers` come on top of the client's."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpClient:
    """Requests to one server, from one event loop. Use as an async context manager,
    or `close` it."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float | None = None,
        host_name: str | None = None,
    ) -> None:
        """`host_name` is what the server is called, where the URL has but its address."""
        self.address = Address.parse(url)
        self.host_name = host_name
        self._headers = dict(headers or {})
        _check_headers(self._headers)
        self._timeout_s = timeout_s
        """Longest silence: before the answer, and between two pieces of it."""
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._idle: list[_Connection] = []
        self._view = memoryview(bytearray(_READ_BYTES))
        self._tls = ssl.create_default_context() if self.address.is_secure else None

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await asyncio.sleep(0)  # in which the closed connections are let go

    def close(self) -> None:
        """Close the connections that are kept open."""
        while self._idle:
            self._idle.pop().abort()

    async def request(self, request: HttpRequest, sink: Sink | None = None) -> HttpResponse:
        """Send, and wait for the whole answer. The body of a 2xx answer goes to `sink` where there
        is one.

        Raises HttpError. A cancelled request closes its connection, by which the server learns of
        it.
        """
        return await self._request(request, sink, None)

    async def relay(self, request: HttpRequest, receiver: Receiver, *, is_safe: bool = True) -> int:
        """Send, and give the answer to `receiver` as it comes; its status, once it is complete.

        Unless `is_safe`, the request has a new connection: on one that was kept, it could have to
        be sent twice. Raises HttpError, and what `request` says of cancelling holds.
        """
        return (await self._request(request, None, receiver, is_safe=is_safe)).status

    async def _request(
        self,
        request: HttpRequest,
        sink: Sink | None,
        receiver: Receiver | None,
        *,
        is_safe: bool = True,
    ) -> HttpResponse:
        data, is_head = self._encode(request), request.method == "HEAD"
        is_reused = is_safe and bool(self._idle)
        connection = self._idle.pop() if is_reused else await self._connect()
        try:
            answer = await connection.exchange(
                data, sink, self._timeout_s, receiver, is_head=is_head
            )
        except HttpError as error:
            # A server may close an idle connection at any time; nothing of this request has been
            # answered then.
            if not is_reused or connection.has_answered or error.kind != "broken":
                raise
            connection = await self._connect()
            answer = await connection.exchange(
                data, sink, self._timeout_s, receiver, is_head=is_head
            )
        if connection.is_reusable:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.abort()
        return answer

    def _encode(self, request: HttpRequest) -> bytes:
        fields = {
            "host": self.host_name or self.address.netloc,
            "content-length": str(len(request.body)),
            **self._headers,
            **request.headers,
        }
        lines = [f"{request.method} {self.address.path}{request.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + request.body

    async def _connect(self) -> _Connection:
        address = self.address
        try:
            async with counted_timeout(self._connect_timeout_s):
                *others, last = await addresses_of(address.host, address.port)
                for host in others:
                    with contextlib.suppress(OSError):
                        return await self._connect_to(host)
                return await self._connect_to(last)
        except TimeoutError:
            raise HttpError(
                f"no connection to {address.netloc} within {self._connect_timeout_s:g} s",
                kind="connect",
            ) from None
        except OSError as error:  # of several attempts, asyncio joins the texts
            number = error.errno or 0  # of the resolver's errors it is negative
            reason = os.strerror(number) if number > 0 else error.strerror or str(error)
            raise HttpError(
                f"cannot connect to {address.netloc}: {reason}", kind="connect"
            ) from None

    async def _connect_to(self, host: str) -> _Connection:
        """Connect to one of the server's addresses. Raises OSError."""
        name = None  # in the server's certificate
        if self._tls is not None:
            name = self.address.host
            if self.host_name is not None:
                name = urlsplit(f"//{self.host_name}").hostname
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._view),
            host,
            self.address.port,
            ssl=self._tls,
            server_hostname=name,
        )
        return connection


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not name.isascii() or not name.replace("-", "").isalnum():
            raise ConfigError(f"{name!r} cannot be the name of a header")
        if not value.isascii() or not value.isprintable():
            raise ConfigError(
                f"the value for the header {name} holds characters that a header cannot have"
            )


class _Connection(asyncio.BufferedProtocol):
    """One connection: one request at a time."""

    def __init__(self, view: memoryview) -> None:
        """`view` is what is read into; it may be shared with others of the same loop."""
        self._view = view
        self._is_between_chunks = False
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._take: Callable[[bytes], bytes] = self._take_head
        """What the bytes that come next are; returns those it cannot use yet."""
        self._done: asyncio.Future[HttpResponse] | None = None
        self._answer = HttpResponse(0, {})
        self._sink: Sink | None = None
        self._receiver: Receiver | None = None
        self._is_paused = False
        self._pieces: list[bytes] = []
        self._num_left = 0
        self._num_collected = 0
        self._keeps = False
        """Whether the connection may be used again once the body has ended."""
        self._is_head = False
        """Whether the answer has no body, whatever length it says."""
        self._is_silent = True
        """Whether nothing has come since the last look."""
        self.has_answered = False
        self.is_reusable = False

    # -- for the client
    # ----------------------------------------------------------------------------------------------

    async def exchange(
        self,
        data: bytes,
        sink: Sink | None,
        timeout_s: float,
        receiver: Receiver | None = None,
        *,
        is_head: bool = False,
    ) -> HttpResponse:
        """Send one request and take in the answer. Raises HttpError."""
        loop = asyncio.get_running_loop()
        transport, self.has_answered, self.is_reusable = self._transport, False, False
        if transport is None or transport.is_closing():
            raise HttpError("the server closed the connection", kind="broken")
        self._done, self._sink, self._pieces, self._num_collected = (
            loop.create_future(),
            sink,
            [],
            0,
        )
        self._receiver, self._is_head = receiver, is_head
        self._take = self._take_head
        transport.write(data)
        try:
            return await self._finish(self._done, timeout_s)
        except BaseException:
            self._done = None  # nothing waits any more for what the end of the connection is
            self.abort()
            raise
        finally:
            self._sink = self._receiver = None

    async def _finish(self, done: asyncio.Future[HttpResponse], timeout_s: float) -> HttpResponse:
        """Wait with a limit on silence; the clock is looked at a few times in that, not at each
        piece."""
        clock, interval_s = looking_clock(timeout_s, asyncio.get_running_loop().time)
        ends_s = clock() + timeout_s
        while (left_s := ends_s - clock()) > 0:
            self._is_silent = True
            await asyncio.wait([done], timeout=min(left_s, interval_s))
            if done.done():
                return done.result()
            if self._is_paused or not self._is_silent:
                ends_s = clock() + timeout_s
        raise HttpError(f"the server was silent for {timeout_s:g} s", kind="timeout")

    def pause(self) -> None:
        """See `Valve`."""
        if self._transport is not None and not self._is_over and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """See `Valve`."""
        if self._transport is not None and self._is_paused:
            self._is_paused = self._is_silent = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol
    # --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """asyncio reads into this, and says so at once; so one is enough for a client."""
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        data = bytes(self._view[:nbytes])
        self._is_silent = False
        if self._is_between_chunks and not (self._buffer or self._is_over) and self._frame(data):
            return
        self._parse(data)

    def _frame(self, data: bytes) -> bool:
        """Hand a single chunk on as it is: that is what a token of a stream comes as."""
        end = data.find(b"\r\n", 0, _MAX_SIZE_LEN)
        if self._receiver is None or end < 1 or not data.endswith(b"\r\n"):
            return False
        size = len(data) - end - 4
        # told by its one spelling: what others might read otherwise is not passed on
        if size < 1 or data[:end] != b"%x" % size:
            return False
        try:
            self._receiver.frame(data, end + 2)
        except Exception as error:
            self._fail(error)
        return True

    def _parse(self, data: bytes) -> None:
        """Parse as far as it goes. What comes behind an answer belongs to none: a connection with
        it would give it to the next request."""
        self._buffer = self._buffer + data if self._buffer else data
        try:
            while self._buffer and not self._is_over:
                before, take = self._buffer, self._take
                self._is_between_chunks = False
                self._buffer = take(before)
                if self._buffer is before and self._take == take:
                    break
            if self._buffer and self._is_over:
                self.abort()
            if self._receiver is not None:
                self._receiver.flush()
        except (
            Exception
        ) as error:  # a sink's, too: it belongs to the caller that waits for this answer
            self._fail(error)

    def eof_received(self) -> None:
        """End a body without a length, or the connection."""
        if not self._is_over and self._take == self._take_rest:
            self._end(can_reuse=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._fail(HttpError("the server broke off the connection", kind="broken"))

    # -- parsing
    # ----------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._done is None or self._done.done()

    def _take_head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise HttpError("the server's headers do not end", kind="protocol")
            return data
        self.has_answered = True
        try:
            version, status, headers = parse_head(data[:end])
            length = body_length(headers)
        except ValueError as error:
            raise HttpError(str(error), kind="protocol") from None
        self._answer = HttpResponse(status, headers)
        if status >= 200:  # before it may come informational ones
            self._keeps = version == "HTTP/1.1" and "close" not in options_of(headers)
            self._begin_body(length)
        return data[end + 4 :]

    def _begin_body(self, length: int | None) -> None:
        answer = self._answer
        if self._receiver is not None:
            self._receiver.head(answer, self)
        if not 200 <= answer.status < 300:
            self._sink = None
        if answer.status in _NO_BODY or self._is_head or length == 0:
            self._end(can_reuse=self._keeps)
        elif length == CHUNKED:
            self._take = self._take_chunk_line
        elif length is None:
            self._take = self._take_rest
        else:
            self._num_left, self._take = length, self._take_counted

    def _take_counted(self, data: bytes) -> bytes:
        piece, rest = data[: self._num_left], data[self._num_left :]
        self._num_left -= len(piece)
        self._give(piece)
        if not self._num_left:
            self._end(can_reuse=self._keeps)
        return rest

    def _take_rest(self, data: bytes) -> bytes:
        self._give(data)
        return b""

    def _take_chunk_line(self, data: bytes) -> bytes:
        end = data.find(b"\r\n")
        if end < 0:
            if len(data) > _MAX_CHUNK_LINE:
                raise HttpError("a chunk's size does not end", kind="protocol")
            return data
        digits = data[:end].split(b";")[0].strip()
        if not _CHUNK_SIZE.fullmatch(digits):
            raise HttpError(f"a chunk's size is {data[:40]!r}", kind="protocol")
        size = int(digits, 16)
        if size == 0:
            self._take = self._take_trailers
        else:
            self._num_left, self._take = size, self._take_chunk
        return data[end + 2 :]

    def _take_chunk(self, data: bytes) -> bytes:
        if self._num_left:
            piece = data[: self._num_left]
            self._num_left -= len(piece)
            self._give(piece)
            data = data[len(piece) :]
            if self._num_left:
                return data
        if len(data) < 2:  # the line end after a chunk
            return data
        if not data.startswith(b"\r\n"):
            raise HttpError(f"a chunk does not end before {data[:40]!r}", kind="protocol")
        self._take = self._take_chunk_line
        self._is_between_chunks = True
        return data[2:]

    def _take_trailers(self, data: bytes) -> bytes:
        end = data.find(b"\r\n")
        if end == 0:
            self._end(can_reuse=self._keeps)
        if end < 0 and len(data) > MAX_HEAD_BYTES:
            raise HttpError("the server's trailers do not end", kind="protocol")
        return data if end < 0 else data[end + 2 :]

    def _give(self, piece: bytes) -> None:
        if self._receiver is not None:
            self._receiver.piece(piece)
            return
        if self._sink is not None:
            self._sink(piece)
            return
        self._num_collected += len(piece)
        if self._num_collected > MAX_BODY_BYTES:
            raise HttpError(f"the answer is larger than {MAX_BODY_BYTES} bytes", kind="protocol")
        self._pieces.append(piece)

    def _end(self, *, can_reuse: bool) -> None:
        self._answer.body = b"".join(self._pieces)
        self._pieces = []
        self.is_reusable = can_reuse
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)
        if not can_reuse and self._transport is not None:
            self._transport.close()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
            with contextlib.suppress(Exception):
                self.abort()


def server_root(url: str) -> str:
    """Return the part of an OpenAI-compatible server's URL before `/v1`,
    with which clients give it or not."""
    return url.rstrip("/").removesuffix("/v1")


def key_headers(api_key: str | None) -> dict[str, str]:
    """Return what shows a key, where there is one. Raises ConfigError for one that cannot be
    sent."""
    headers = {"authorization": f"Bearer {api_key.strip()}"} if api_key else {}
    _check_headers(headers)
    return headers
