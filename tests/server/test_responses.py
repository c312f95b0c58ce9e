"""Streams of events: the same bytes whether a task sends them or they go straight into
the connection, and in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from starlette.types import Message

from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.server.api.generation import PassOn
from quire.server.http.call import Call
from quire.server.http.errors import ApiError
from quire.server.http.responses import (
    KEEP_ALIVE,
    WRITER,
    Events,
    EventStream,
    TextEvent,
    data_event,
)
from quire.server.quota.tenants import EVERYBODY

CALL = Call("req_1", EVERYBODY)


def _output(text: str, *, is_last: bool = False) -> RequestOutput:
    reason = "stop" if is_last else None
    return RequestOutput(
        "r", None, [], [CompletionOutput(0, text, [1], finish_reason=reason)], finished=is_last
    )


class _Run:
    """Outputs that come when they are told to; the contract of `Run` as
    far as a stream relies on it."""

    def __init__(self) -> None:
        self.items: list[RequestOutput] = []
        self.news = asyncio.Event()
        self.is_finished = False
        self.is_closed = False
        self.pass_on: PassOn | None = None
        self.num_waits = 0

    @property
    def is_over(self) -> bool:
        return self.is_finished and not self.items

    def put(self, output: RequestOutput) -> bool:
        """Whether it went past the task."""
        self.is_finished = output.finished
        if (
            not output.finished
            and self.pass_on is not None
            and not self.items
            and self.pass_on(0, output)
        ):
            return True
        self.items.append(output)
        self.news.set()
        return False

    def watch(self, receive: Any) -> None:
        pass

    async def get(self, wait_s: float, pass_on: PassOn | None) -> tuple[int, RequestOutput] | None:
        self.num_waits += 1
        if not self.items:
            self.news.clear()
            self.pass_on = pass_on
            try:
                await asyncio.wait_for(self.news.wait(), max(wait_s, 0))
            except TimeoutError:
                return None
            finally:
                self.pass_on = None
        return 0, self.items.pop(0)

    def take(self) -> tuple[int, RequestOutput] | None:
        return (0, self.items.pop(0)) if self.items else None

    async def close(self) -> None:
        self.is_closed = True


class _Events:
    def take(self, number: int, output: RequestOutput) -> bytes:
        text = output.outputs[0].text
        if text == "bug":
            raise ValueError(text)
        return b"<%b>" % text.encode() if text else b""

    def end(self) -> bytes:
        return b"end"

    def fail(self, error: ApiError) -> bytes:
        return b"failed %d" % error.status


class _Client:
    """Both ways to a client: what arrives, in order, and whether it takes more."""

    def __init__(self) -> None:
        self.got = b""
        self.num_sent = 0
        self.is_ready = True

    async def send(self, message: Message) -> None:
        self.num_sent += 1
        self.got += message.get("body", b"")

    def can_write(self) -> bool:
        return self.is_ready

    def write(self, body: bytes) -> None:
        assert self.is_ready and body
        self.got += body


def _serve(
    script: Callable[[_Run, _Client], Iterable[None]],
    *,
    has_writer: bool,
    keep_alive_s: float = 30.0,
) -> _Client:
    """Serve a stream; between two steps of `script` the loop runs dry."""

    async def run() -> _Client:
        source, client, events = _Run(), _Client(), _Events()
        judged: Events = events
        stream = EventStream(CALL, source, judged, keep_alive_s)  # type: ignore[arg-type]
        scope: dict[str, Any] = {"extensions": {WRITER: {"writer": client}}} if has_writer else {}
        task = asyncio.create_task(stream(scope, asyncio.Queue().get, client.send))
        for _ in script(source, client):
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.wait_for(task, 10)
        assert source.is_closed
        return client

    return asyncio.run(run())


@pytest.mark.parametrize("has_writer", [False, True])
def test_every_output_arrives_once_and_in_order_however_fast_the_client_reads(
    has_writer: bool,
) -> None:
    passed = []

    def script(run: _Run, client: _Client) -> Iterable[None]:
        yield
        for number, text in enumerate("abcdefgh"):
            client.is_ready = number not in (3, 4)
            passed.append(run.put(_output(text)))
            if number not in (3, 6):  # two that come before the task has had its turn
                yield
        run.put(_output("z", is_last=True))

    client = _serve(script, has_writer=has_writer)
    assert client.got == b"<a><b><c><d><e><f><g><h><z>end"
    assert passed == [has_writer and number not in (0, 3, 4) for number in range(8)]


@pytest.mark.parametrize("has_writer", [False, True])
def test_an_output_that_cannot_be_shown_ends_its_stream_with_an_error(has_writer: bool) -> None:
    def script(run: _Run, client: _Client) -> Iterable[None]:
        run.put(_output("a"))
        yield
        run.pass_on = None  # what `Run` does with a failure is its own test's
        run.put(_output("bug"))
        yield

    assert _serve(script, has_writer=has_writer).got == b"<a>failed 500"


def test_silence_is_what_the_client_has_not_heard_whoever_wrote_last() -> None:
    async def run() -> tuple[_Client, int]:
        source, client = _Run(), _Client()
        stream = EventStream(CALL, source, _Events(), 0.2)  # type: ignore[arg-type]
        task = asyncio.create_task(
            stream({"extensions": {WRITER: {"writer": client}}}, asyncio.Queue().get, client.send)
        )
        source.put(_output("a"))
        while KEEP_ALIVE not in client.got:
            await asyncio.sleep(0.01)
        num_sent = client.num_sent
        assert source.put(_output("b"))
        source.put(_output("", is_last=True))
        await asyncio.wait_for(task, 10)
        return client, num_sent

    client, num_sent = asyncio.run(run())
    assert client.got.startswith(b"<a>" + KEEP_ALIVE) and client.got.endswith(b"<b>end")
    assert num_sent == 3  # the head, the first event, a comment


@pytest.mark.parametrize("text", ["", "a", '"\\', "\n\t\x00\x7f", "ü€😀", "</script>", "\u2028"])
def test_an_event_around_a_text_is_what_it_would_be_as_a_whole(text: str) -> None:
    def make(text: str) -> bytes:
        return data_event({"id": "x", "choices": [{"index": 0, "text": text}], "usage": None})

    event = TextEvent(make)
    assert event.around(text) == make(text)
    assert json.loads(event.around(text)[6:])["choices"][0]["text"] == text
