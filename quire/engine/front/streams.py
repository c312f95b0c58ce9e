"""The way of outputs from a link's thread back to the event loops that wait for them.

Owns the streams, one a request, and the post that a link's thread hands outputs to: as many as a
step brings go to an event loop in one call. A stream is fed in its loop's thread alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from quire.engine.front.outputs import RequestOutput

Item = RequestOutput | BaseException
Merge = Callable[[RequestOutput, RequestOutput], RequestOutput]
"""(earlier, later) -> both as one."""


class Caller(Protocol):
    """What runs a function in the thread that a stream belongs to, such as its event loop."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Run it soon; for any thread. Raises RuntimeError where nothing is run any more."""
        ...


class OutputSink(Protocol):
    """Where one request's outputs go."""

    @property
    def loop(self) -> Caller:
        """What calls the other methods."""
        ...

    def put(self, output: RequestOutput) -> None:
        """Take an output."""
        ...

    def fail(self, error: BaseException) -> None:
        """Take the error that ends the request."""
        ...


class Stream:
    """One request's outputs, for the event loop in which it was made. Iterate once;
    the last output is `finished`."""

    def __init__(self, merge: Merge | None = None) -> None:
        """With `merge` at most one output waits for the reader:
        a slow one costs no more than its answer."""
        self.loop: Caller = asyncio.get_running_loop()
        self._merge = merge
        self._items: deque[Item] = deque()
        self._has_news = asyncio.Event()
        self._take: Callable[[RequestOutput], None] | None = None
        self._has_ended = False
        self._is_read = False
        """Whether the reader has had the last output."""

    def listen(self, take: Callable[[RequestOutput], None]) -> None:
        """Give every output to `take`, in the event loop's thread, in place of iteration;
        it must not raise."""
        self._take = take
        while self._items:
            item = self._items.popleft()
            assert isinstance(item, RequestOutput)
            take(item)

    def put(self, output: RequestOutput) -> None:
        """Give the reader something."""
        if self._take is not None:
            self._take(output)
        elif (
            self._merge is not None
            and self._items
            and isinstance(earlier := self._items[-1], RequestOutput)
        ):
            self._items[-1] = self._merge(earlier, output)
        else:
            self._items.append(output)
        self._has_news.set()
        if output.finished:
            self._finish(has_left=False)

    def fail(self, error: BaseException) -> None:
        """End the stream: its reader gets an exception."""
        self._items.append(error)
        self._has_news.set()
        self._finish(has_left=False)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_read:
            raise StopAsyncIteration
        while not self._items:
            self._has_news.clear()
            await self._has_news.wait()
        item = self._items.popleft()
        if isinstance(item, BaseException):
            self._is_read = True
            raise item
        self._is_read = item.finished
        return item

    async def aclose(self) -> None:
        """Abort the request if it is not finished. Idempotent."""
        self._take = None  # it refers to this stream: only the cycle collector would free the two
        self._is_read = True
        self._finish(has_left=True)

    def _finish(self, *, has_left: bool) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.ended(has_left=has_left)

    def ended(self, *, has_left: bool) -> None:
        """Called once: the last output has come, or the reader left before."""


class Post:
    """The streams of the requests that a link serves. Belongs to the link's thread."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputSink] = {}

    def open(self, request_id: str, stream: OutputSink) -> None:
        """Send a request's outputs to `stream` from now on."""
        self._streams[request_id] = stream

    def find(self, request_id: str) -> OutputSink | None:
        """Return the stream of a request in flight."""
        return self._streams.get(request_id)

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Send outputs on their way; those of requests without a stream go nowhere."""
        found = [
            (stream, each)
            for each in outputs
            if (stream := self._streams.get(each.request_id)) is not None
        ]
        for _, output in found:
            if output.finished:
                del self._streams[output.request_id]
        send(found)

    def fail_all(self, error: BaseException) -> None:
        """End all streams."""
        send([(stream, error) for stream in self._streams.values()])
        self._streams.clear()


def send(items: Iterable[tuple[OutputSink, Item]]) -> None:
    """Put items into their streams, each in its own event loop's thread. For any thread."""
    by_loop: dict[Caller, list[tuple[OutputSink, Item]]] = {}
    for each in items:
        by_loop.setdefault(each[0].loop, []).append(each)
    for loop, theirs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: the reader has gone
            loop.call_soon_threadsafe(_put_all, theirs)


def _put_all(items: list[tuple[OutputSink, Item]]) -> None:
    for stream, item in items:
        if isinstance(item, BaseException):
            stream.fail(item)
        else:
            stream.put(item)


def merge_deltas(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Return two successive deltas as one."""
    before = {each.index: each for each in earlier.outputs}
    for each in later.outputs:
        known = before.pop(each.index, None)
        if known is not None:
            moved = ((len(known.text) + run[0], len(known.text) + run[1]) for run in each.drafted)
            each.drafted = (*known.drafted, *moved)
            each.text = known.text + each.text
            each.token_ids = known.token_ids + each.token_ids
            if known.logprobs is not None:
                each.logprobs = known.logprobs + (each.logprobs or [])
    later.outputs += before.values()
    later.prompt_logprobs = (
        later.prompt_logprobs if later.prompt_logprobs is not None else earlier.prompt_logprobs
    )
    return later
