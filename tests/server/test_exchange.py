"""What leaves a connection, looked at without one: its framing, in how many writes it goes,
and that nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from typing import Any

import pytest
from clock_loop import ClockLoop, run_in_clock_loop
from fake_client import FakeClient, Script
from uvicorn.server import ServerState

from quire.config.api import ApiConfig
from quire.server.app import build_app
from quire.server.http.protocol import IDLE_S, BoundedProtocol, uvicorn_config
from quire.server.quota.tenants import key_ring

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Pipe(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


class App:
    """Answers everything with these messages."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = messages

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for message in self._messages:
            await send(message)


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    """The head of an answer."""
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, *, is_last: bool = True) -> dict[str, Any]:
    """A piece of its body."""
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def connect(app: Any) -> tuple[BoundedProtocol, Pipe]:
    """A connection to `app`, in the loop that runs."""
    config = uvicorn_config(app, ApiConfig())
    config.load()
    protocol = BoundedProtocol(config, ServerState(), {})
    pipe = Pipe()
    protocol.connection_made(pipe)
    return protocol, pipe


async def ask(connection: tuple[BoundedProtocol, Pipe], request: bytes) -> list[bytes]:
    """What is written for a request."""
    protocol, pipe = connection
    pipe.written.clear()
    protocol.data_received(request)
    await asyncio.gather(*protocol.tasks, return_exceptions=True)
    return list(pipe.written)


def answer(messages: Sequence[dict[str, Any]], request: bytes = GET) -> tuple[list[bytes], bool]:
    """What is written for one request, and whether the connection was closed."""

    async def run() -> tuple[list[bytes], bool]:
        connection = connect(App(*messages))
        written = await ask(connection, request)
        is_closed = connection[1].is_closed
        connection[0].connection_lost(None)
        return written, is_closed

    return asyncio.run(run())


def test_a_short_answer_is_one_write() -> None:
    written, is_closed = answer([start((b"content-length", b"2")), body(b"ok")])
    assert written == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"] and not is_closed


def test_a_body_without_a_length_is_chunked_and_its_head_leaves_with_its_first_piece() -> None:
    written, is_closed = answer(
        [start(), body(b"a" * 16, is_last=False), body(b"", is_last=False), body(b"b")]
    )
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (
        written == [head + b"10\r\n" + b"a" * 16 + b"\r\n", b"1\r\nb\r\n0\r\n\r\n"]
        and not is_closed
    )


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\ny", b"a\ry", b"a\x00", b"\r\n\r\n"])
def test_a_header_cannot_end_a_line(value: bytes) -> None:
    written, is_closed = answer([start((b"x", value), (b"content-length", b"0")), body(b"")])
    assert written == [] and is_closed


@pytest.mark.parametrize("pieces", [[b"abc"], [b"a"], [b"a", b"bc"], [b""]])
def test_a_body_of_another_length_than_was_announced_ends_the_connection(
    pieces: list[bytes],
) -> None:
    messages = [
        body(piece, is_last=number == len(pieces) - 1) for number, piece in enumerate(pieces)
    ]
    written, is_closed = answer([start((b"content-length", b"2")), *messages])
    assert (
        is_closed
        and b"".join(written).count(b"HTTP/1.1") <= 1
        and not b"".join(written).endswith(b"bc")
    )


@pytest.mark.parametrize(
    "messages",
    [
        [body(b"x")],
        [start((b"content-length", b"0")), start(), body(b"")],
        [start((b"content-length", b"1")), body(b"x"), body(b"y")],
        [start()],
        [],
    ],
)
def test_what_is_out_of_order_makes_no_second_answer(messages: list[dict[str, Any]]) -> None:
    written, is_closed = answer(messages)
    assert is_closed or len(written) == 1
    assert b"".join(written).count(b"HTTP/1.1 ") <= 1 and not b"".join(written).endswith(b"y")


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)])
def test_some_answers_have_no_body(method: bytes, status: int) -> None:
    [written], is_closed = answer(
        [start(status=status), body(b"text")], GET.replace(b"GET", method)
    )
    assert written.endswith(b"\r\n\r\n") and b"transfer-encoding" not in written and not is_closed


def test_a_body_that_comes_after_its_answer_does_not_end_the_connection() -> None:
    """The clock for the next request's headers once ran from there on,
    and closed connections in the middle of their rest."""

    async def run(loop: ClockLoop) -> None:
        protocol, pipe = connection = connect(App(start((b"content-length", b"2")), body(b"ok")))
        header_timeout_s = ApiConfig().header_timeout_s
        late = GET.replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n")
        assert len(await ask(connection, late)) == 1
        await loop.pass_time(header_timeout_s - 1)
        protocol.data_received(b"{}")
        await loop.pass_time(header_timeout_s + 1)
        assert header_timeout_s + 1 < IDLE_S and not pipe.is_closed
        assert len(await ask(connection, late)) == 1
        await loop.pass_time(header_timeout_s + 1)
        assert pipe.is_closed, "the rest of a body is waited for as long as headers are"
        protocol.connection_lost(None)

    run_in_clock_loop(run)


def test_an_answer_that_takes_its_time_is_not_cut_off_by_the_clocks() -> None:
    async def run(loop: ClockLoop) -> None:
        may_answer = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await may_answer.wait()
            await App(start((b"content-length", b"2")), body(b"ok"))(scope, receive, send)

        protocol, pipe = connect(app)
        protocol.data_received(GET)
        await loop.pass_time(10 * IDLE_S)
        assert pipe.written == [] and not pipe.is_closed
        may_answer.set()
        await asyncio.gather(*protocol.tasks)
        assert len(pipe.written) == 1 and not pipe.is_closed
        await loop.pass_time(IDLE_S + 1)
        assert pipe.is_closed
        protocol.connection_lost(None)

    run_in_clock_loop(run)


def test_neither_a_refusal_nor_an_answer_leaves_anything_for_the_cycle_collector() -> None:
    """Under overload it would be megabytes, until the collector looks."""
    text = json.dumps({"prompt": "x"}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(text) + text
    )

    async def leftovers(script: Script, status: bytes) -> list[str]:
        client = FakeClient(script)
        app = build_app(ApiConfig(max_queued_requests=1), client, key_ring([]))
        others, mine = connect(app), connect(app)
        if not script.begins:
            others[0].data_received(request)
            while not client.streams:
                await asyncio.sleep(0)
        for _ in range(3):
            assert b"".join(await ask(mine, request)).startswith(b"HTTP/1.1 " + status)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            left = []
            for _ in range(3):  # threads of other tests may leave something, but not each time
                for _ in range(10):
                    await ask(mine, request)
                gc.collect()
                left.append([f"{type(each).__qualname__} {each!r:.99}" for each in gc.garbage])
                gc.garbage.clear()
            return min(left, key=len)
        finally:
            gc.set_debug(0)
            gc.enable()
            for protocol, _ in (others, mine):
                protocol.connection_lost(None)
            await asyncio.gather(*others[0].tasks, return_exceptions=True)

    assert asyncio.run(leftovers(Script(begins=False), b"429")) == []
    assert asyncio.run(leftovers(Script(pieces=("one",)), b"200")) == []
