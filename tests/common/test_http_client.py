"""The client against a server whose every byte is known: framing, reuse, errors, deadlines,
cancellation, events."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from timing import timed

from quire.common.event_reader import EventReader
from quire.common.http_client import (
    Address,
    HttpClient,
    HttpError,
    HttpRequest,
    key_headers,
    server_root,
)
from quire.errors import ConfigError

pytestmark = timed

GET = HttpRequest("GET", "/x")
Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(handle: Handle, **options: Any) -> AsyncIterator[HttpClient]:
    """A client of a server that does `handle` with each connection."""
    handlers: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        await handle(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, HttpClient(f"http://127.0.0.1:{port}/base/", **options) as client:
        yield client
    await asyncio.wait_for(asyncio.gather(*handlers), 60)  # the server notices, and lets its end go
    await asyncio.sleep(0)


def raw(*answers: bytes, heads: list[bytes] | None = None, piece: int | None = None) -> Handle:
    """Answer the requests of a connection with these bytes, cut into pieces, then close."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.closing(writer),
            contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
        ):
            for answer in answers:
                head = await reader.readuntil(b"\r\n\r\n")
                if heads is not None:
                    heads.append(head)
                for start in range(0, len(answer), piece or 1 << 20):
                    writer.write(answer[start : start + (piece or 1 << 20)])
                    await writer.drain()
                    await asyncio.sleep(0)

    return handle


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n5;x=y\r\nhello\r\n1\r\n!\r\n0\r\nT: v\r\n\r\n"
COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello!"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nhello!"
TWICE = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\ncontent-length: 6\r\nConnection: x, Close\r\n\r\nhello!"
INFORMED = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + COUNTED


@pytest.mark.parametrize("answer", [CHUNKED, COUNTED, TWICE, UNTIL_CLOSED, INFORMED])
@pytest.mark.parametrize("piece", [None, 1, 7])
def test_every_framing_cut_anywhere(answer: bytes, piece: int | None) -> None:
    async def ask() -> None:
        heads: list[bytes] = []
        async with served(raw(answer, heads=heads, piece=piece), headers={"x-own": "1"}) as client:
            got = await client.request(GET)
            assert (got.status, got.body) == (200, b"hello!")
            assert (
                heads[0].startswith(b"GET /base/x HTTP/1.1\r\nhost: 127.0.0.1:")
                and b"x-own: 1\r\n" in heads[0]
            )
        async with served(raw(answer, piece=piece)) as client:
            pieces: list[bytes] = []
            got = await client.request(GET, pieces.append)
            assert got.body == b"" and b"".join(pieces) == b"hello!"

    asyncio.run(ask())


def test_connections_are_used_again_and_replaced_when_they_went_stale() -> None:
    async def ask() -> None:
        heads: list[bytes] = []
        async with served(raw(COUNTED, CHUNKED, heads=heads)) as client:
            for _ in range(5):  # the third finds its connection closed, and takes another
                assert (await client.request(GET)).body == b"hello!"
                await asyncio.sleep(0.01)
            assert len(heads) == 5

    asyncio.run(ask())


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_what_comes_behind_an_answer_is_no_answer_to_another_request(delay_s: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(COUNTED)
                await asyncio.sleep(delay_s)
                writer.write(COUNTED.replace(b"hello!", b"poison"))

    async def ask() -> None:
        async with served(handle) as client:
            for _ in range(3):
                assert (await client.request(GET)).body == b"hello!"
                await asyncio.sleep(3 * delay_s)

    asyncio.run(ask())


def test_a_head_has_no_body_whatever_length_it_says() -> None:
    async def ask() -> None:
        head = COUNTED.removesuffix(b"hello!")
        async with served(raw(head, COUNTED), timeout_s=5.0) as client:
            got = await client.request(HttpRequest("HEAD", "/x"))
            assert (got.headers["content-length"], got.body) == ("6", b"")
            assert (await client.request(GET)).body == b"hello!"

    asyncio.run(ask())


def test_an_error_body_is_collected_and_never_reaches_the_sink() -> None:
    async def ask() -> None:
        pieces: list[bytes] = []
        async with served(
            raw(b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\nRetry-After: 7\r\n\r\nno")
        ) as client:
            got = await client.request(GET, pieces.append)
            assert (got.status, got.body, got.headers["retry-after"], pieces) == (
                429,
                b"no",
                "7",
                [],
            )
        async with served(raw(b"HTTP/1.1 204 Nothing\r\n\r\n", COUNTED)) as client:
            assert (await client.request(GET)).status == 204
            assert (await client.request(GET)).body == b"hello!"

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "protocol", "not an answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", "broken", "broke off"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            "protocol",
            "chunk's size",
        ),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-3\r\nabcdef\r\n",
            "protocol",
            "chunk's size",
        ),
        *(
            (b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n{}", "protocol", message)
            for head, message in (
                (b"content-length: -4", "length"),
                (b"content-length: \xb2", "length"),
                (b"content-length: " + b"9" * 5000, "length"),
                (b"content-length: 2\r\ncontent-length: 5", "length is '2, 5'"),
                (b"transfer-encoding: gzip, chunked", "transfer-encoding 'gzip, chunked'"),
                (b"x-a: b\nset-cookie: c=d", "no valid header"),
                (b"x-a: b\r\n folded", "no valid header"),
                (b"x a: b", "no valid header"),
                (b"x-a", "no valid header"),
            )
        ),
        (b"HTTP/1.1 000 None\r\n\r\n", "protocol", "not an answer in HTTP"),
        (b"HTTP/1.1 \xb2\xb2\xb2 OK\r\n\r\n", "protocol", "not an answer in HTTP"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabXX0\r\n\r\n",
            "protocol",
            "chunk does not end",
        ),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70000, "protocol", "do not end"),
        (b"", "broken", "broke off"),
    ],
)
def test_what_servers_do_wrong_has_a_name(answer: bytes, kind: str, message: str) -> None:
    async def ask() -> None:
        async with served(raw(answer)) as client:
            with pytest.raises(HttpError, match=message) as caught:
                await client.request(GET)
            assert caught.value.kind == kind

    asyncio.run(ask())


def test_silence_has_a_limit_but_a_slow_stream_is_not_silent() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
        for _ in range(3):
            writer.write(b"x")
            await asyncio.sleep(0.1)
        await reader.read()
        writer.close()

    async def ask() -> None:
        async with served(silent, timeout_s=0.25) as client:
            started_s = asyncio.get_running_loop().time()
            with pytest.raises(HttpError, match=r"silent for 0\.25 s") as caught:
                await client.request(GET)
            assert caught.value.kind == "timeout"
            assert asyncio.get_running_loop().time() - started_s >= 0.4

    asyncio.run(ask())


class LeapingLoop(asyncio.SelectorEventLoop):
    """Its clock leaps, as after a time in which the process was stopped."""

    leapt_s = 0.0

    def time(self) -> float:
        return super().time() + self.leapt_s


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_server_is_not_silent_while_the_client_is_stopped(is_begun: bool) -> None:
    async def ask() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, LeapingLoop)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if is_begun:
                writer.write(COUNTED[:-3])
            await asyncio.sleep(0.05)
            for _ in range(3):
                loop.leapt_s += 3600.0
                await asyncio.sleep(0.05)  # in which all that is due by now happens
            writer.write(COUNTED[-3:] if is_begun else COUNTED)
            writer.close()

        async with served(handle, timeout_s=60.0) as client:
            assert (await client.request(GET)).body == b"hello!"

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(ask())


def test_a_cancelled_request_closes_its_connection() -> None:
    async def ask() -> None:
        has_come, is_closed = asyncio.Event(), asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            has_come.set()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            is_closed.set()
            writer.close()

        async with served(handle) as client:
            task = asyncio.create_task(client.request(GET))
            await asyncio.wait_for(has_come.wait(), 60)
            task.cancel()
            await asyncio.wait_for(is_closed.wait(), 60)

    asyncio.run(ask())


def test_a_failing_sink_fails_its_request() -> None:
    async def ask() -> None:
        def sink(piece: bytes) -> None:
            raise LookupError(piece.decode())

        async with served(raw(COUNTED)) as client:
            with pytest.raises(LookupError, match="hello!"):
                await client.request(GET, sink)

    asyncio.run(ask())


def test_a_server_that_is_not_there() -> None:
    async def ask() -> None:
        async with HttpClient("http://127.0.0.1:1") as client:
            with pytest.raises(
                HttpError, match=r"cannot connect to 127\.0\.0\.1:1: .*refused"
            ) as caught:
                await client.request(GET)
            assert caught.value.kind == "connect"

    asyncio.run(ask())


def test_urls() -> None:
    assert Address.parse("localhost:8000") == Address("localhost", 8000, "", False)
    assert Address.parse("https://x.org/a/b/") == Address("x.org", 443, "/a/b", True)
    assert Address.parse("http://[::1]:9").netloc == "[::1]:9"
    assert server_root("http://x/v1/") == "http://x" == server_root("http://x")
    for bad in (
        "ftp://x",
        "http://",
        "http://x:99999",
        "http://x/?q=1",
        "http://me@x",
        "http://x/a b",
        "http://[::1",
        "http://[x]",
        "http://x:0",
        "http://:@x",
    ):
        with pytest.raises(ConfigError, match=re.escape(repr(bad))):
            Address.parse(bad)


def test_keys() -> None:
    assert key_headers("k\n") == {"authorization": "Bearer k"} and key_headers(None) == {}
    with pytest.raises(ConfigError) as caught:
        key_headers("secret\r\nx: y")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_in_any_pieces(size: int) -> None:
    text = b": hi\n\ndata: one\n\ndata:two\r\ndata: lines\r\n\r\nevent: x\nid: 1\ndata: \xc3\xa9\r\rdata: cut"
    events: list[bytes] = []
    reader = EventReader(events.append)
    for start in range(0, len(text), size):
        reader(text[start : start + size])
    assert events == [b"one", b"two\nlines", b"\xc3\xa9"]


def test_a_resolver_that_does_not_answer_keeps_neither_a_request_nor_the_process_s_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An event loop's own lookups are waited for when it is closed."""
    answered, given_up = threading.Event(), threading.Timer(60, lambda: answered.set())

    def resolve(*_: Any, **__: Any) -> list[Any]:
        answered.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def run() -> None:
        async with HttpClient("http://replicas:8000", connect_timeout_s=0.05) as client:
            with pytest.raises(HttpError, match="no connection") as caught:
                await client.request(GET)
            assert caught.value.kind == "connect"

    given_up.start()
    try:
        asyncio.run(run())
        assert not answered.is_set()
    finally:
        given_up.cancel()
        answered.set()


def test_a_name_with_several_addresses_is_reached_at_the_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert host == "replicas"
        return [(0, 0, 0, "", (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()
        await writer.wait_closed()

    async def run() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        async with server, HttpClient(f"http://replicas:{port}") as client:
            assert (await client.request(GET)).body == b"hi"

    asyncio.run(run())
