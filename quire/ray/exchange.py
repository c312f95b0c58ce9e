"""One HTTP request as plain values, on its way from an ingress to a replica and back: what goes is
a mapping, what comes back is the answer's head and then pieces of its body."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]
Request = dict[str, Any]
"""`method`, `path`, `query_string`, `headers` (pairs of bytes), `body`, `client`."""

END_TIMEOUT_S = 10.0
"""For the application to end a request whose client has left."""
_MAX_PIECES = 64
"""Of an answer that has not been taken yet."""


def request_of(scope: Message, body: bytes) -> Request:
    """Return an ASGI request as values that can be sent. The path is as it came, behind the prefix
    under which Serve has the application."""
    path = bytes(scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    prefix = scope.get("root_path", "")
    if prefix and (path == prefix or path.startswith(f"{prefix}/")):
        path = path[len(prefix) :] or "/"
    return {
        "method": scope["method"], "path": path, "query_string": scope["query_string"],
        "headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]],
        "body": body, "client": scope.get("client"),
    }  # fmt: skip


async def run(app: AsgiApp, request: Request) -> AsyncGenerator[Any, None]:
    """Have an application answer: yields (status, headers) and then bytes. A consumer that stops
    early is a client that has left."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_PIECES)
    has_left = asyncio.Event()
    is_asked = False

    async def receive() -> Message:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            return {"type": "http.request", "body": request["body"], "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def answer() -> None:
        try:
            await app(_scope_of(request), receive, messages.put)
        finally:
            await messages.put(None)

    answering = asyncio.create_task(answer())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield message["status"], [tuple(map(bytes, each)) for each in message["headers"]]
            elif message.get("body"):
                yield bytes(message["body"])
        await answering
    finally:
        has_left.set()
        if not answering.done():
            await _end(answering, messages)


async def _end(answering: asyncio.Task[None], messages: asyncio.Queue[Message | None]) -> None:
    """Let the application see that its client has left; what it still says is dropped."""

    async def drop() -> None:
        while await messages.get() is not None:
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drop(), END_TIMEOUT_S)
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await answering


def _scope_of(request: Request) -> Message:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
        "method": request["method"], "scheme": "http", "path": request["path"],
        "raw_path": request["path"].encode(), "query_string": request["query_string"],
        "root_path": "", "headers": request["headers"], "client": request["client"],
        "server": None, "state": {},
    }  # fmt: skip
