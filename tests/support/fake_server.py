"""A server with known delays that speaks just enough of OpenAI's API:
for clients whose figures must come out right."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Plan:
    """How one request is answered."""

    status: int = 200
    first_s: float = 0.0
    """To the first token."""
    gap_s: float = 0.0
    pieces: list[str] | None = None
    """Texts of the events; by default as many as max_tokens asks for."""
    has_done: bool = True
    is_cut: bool = False
    """The connection breaks off before the end."""
    error: str | None = None
    """Sent as an event in the place of the rest."""
    headers: dict[str, str] = field(default_factory=dict)
    is_chunked: bool = True
    has_usage: bool = True


@dataclass(slots=True)
class Seen:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class FakeServer:
    """Runs in a thread of its own; `plan` is asked for each POST."""

    def __init__(self, plan: Callable[[Seen], Plan]) -> None:
        self.plan = plan
        self.seen: list[Seen] = []
        self.num_connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def posts(self) -> list[Seen]:
        """Requests but those about the server."""
        return [each for each in self.seen if each.method == "POST"]

    async def _run(self, is_up: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        is_up.set()
        await stop.wait()
        server.close()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.sleep(0)  # in which their connections are let go

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        method, path, _ = request_line.split(" ")
        seen = Seen(method, path, headers, json.loads(data) if data else None)
        self.seen.append(seen)
        if method == "GET":
            body = {
                "/v1/models": {"data": [{"id": "fake", "max_model_len": 99}]},
                "/version": {"version": "7"},
            }.get(path)
            _whole(writer, 404 if body is None else 200, json.dumps(body).encode())
            return True
        return await _answer(writer, self.plan(seen), seen)

    def serve(self) -> Iterator[FakeServer]:
        is_up, stop = threading.Event(), asyncio.Event()
        thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._run(is_up, stop))
        )
        thread.start()
        assert is_up.wait(60)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(stop.set)
            thread.join(60)
            self._loop.close()


@contextmanager
def fake_server(plan: Callable[[Seen], Plan] = lambda seen: Plan()) -> Iterator[FakeServer]:
    """Serve while the block runs."""
    yield from FakeServer(plan).serve()


def _whole(
    writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


async def _answer(writer: asyncio.StreamWriter, plan: Plan, seen: Seen) -> bool:
    if plan.status != 200:
        _whole(writer, plan.status, b'{"error": {"message": "no"}}', plan.headers)
        return True
    writer.write(
        b"HTTP/1.1 200 OK\r\n"
        + (b"transfer-encoding: chunked\r\n\r\n" if plan.is_chunked else b"\r\n")
    )

    def send(event: Any) -> None:
        data = (
            b"data: "
            + (event if isinstance(event, bytes) else json.dumps(event).encode())
            + b"\n\n"
        )
        writer.write(b"%x\r\n%s\r\n" % (len(data), data) if plan.is_chunked else data)

    is_chat = "chat" in seen.path
    pieces = plan.pieces if plan.pieces is not None else ["x"] * seen.body["max_tokens"]
    if is_chat:
        send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for number, piece in enumerate(pieces):
        await writer.drain()
        await asyncio.sleep(plan.gap_s if number else plan.first_s)
        send(
            {
                "choices": [
                    {"index": 0, "delta": {"content": piece}}
                    if is_chat
                    else {"index": 0, "text": piece}
                ]
            }
        )
    if plan.is_cut:
        writer.transport.abort()
        return False
    if plan.error is not None:
        send({"error": {"message": plan.error}})
    else:
        send({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]})
        if plan.has_usage:
            send({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": len(pieces)}})
    if plan.has_done:
        send(b"[DONE]")
    if plan.is_chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return plan.is_chunked
