"""Back ends for the router in the test's own event loop: OpenAI's completions, answered with texts
that tell whose they are, and every way of failing there is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ports import reserved_port

_NO = b'{"error": {"message": "no"}}'


@dataclass(slots=True)
class FakeBackend:
    """One back end. What it does can be changed at any time."""

    name: str
    status: int = 200
    gap_s: float = 0.0
    models: tuple[str, ...] = ("m",)
    cut_after: int | None = None
    """Break off after so many events."""
    is_silent: bool = False
    """Take requests, and answer nothing."""
    body: bytes | None = None
    """Of an answer with another status."""
    stored: set[str] = field(default_factory=set)
    """Paths that it knows below /v1/responses/."""
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_cancelled: int = 0
    num_completed: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        """Those that are open."""
        return len(self._writers)

    async def start(self) -> None:
        """Listen, on the same port as before, which nothing else has taken meanwhile."""
        self.port = self.port or reserved_port()
        self._server = await asyncio.start_server(
            self._connection, "127.0.0.1", self.port, backlog=1024
        )

    async def close(self) -> None:
        """Take no more connections."""
        assert self._server is not None
        self._server.close()

    async def kill(self) -> None:
        """Be gone at once, as a killed process is."""
        await self.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._writers.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        method, path, _ = request_line.split(" ")
        if path.startswith("/v1/kv_events"):  # it tells nothing of what it caches
            return _whole(writer, 404, b"{}")
        while self.is_silent:
            await asyncio.sleep(0.01)
            if reader.at_eof():
                self.num_cancelled += 1
                return False
        if path == "/health":
            return _whole(writer, 200, b"{}")
        self.headers.append(headers)
        if path == "/v1/models":
            shown = {"data": [{"id": name, "object": "model"} for name in self.models]}
            return _whole(writer, 200, json.dumps(shown).encode())
        if path.startswith("/v1/responses/"):
            known = path in self.stored
            return _whole(writer, 200 if known else 404, json.dumps({"of": self.name}).encode())
        body = json.loads(data) if data else {}
        self.bodies.append(body)
        if self.status != 200:
            return _whole(writer, self.status, _NO if self.body is None else self.body)
        if method == "POST" and body.get("stream"):
            return await self._stream(reader, writer, body)
        await asyncio.sleep(self.gap_s)
        self.num_completed += 1
        answer = {"text": answer_text(body), "of": self.name, "usage": {"completion_tokens": 3}}
        return _whole(writer, 200, json.dumps(answer).encode())

    async def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Any
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        words = answer_text(body).split()
        for number, word in enumerate(words):
            if self.cut_after == number:
                writer.transport.abort()
                return False
            event = b"data: " + json.dumps({"word": word}).encode() + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(self.gap_s)
            if reader.at_eof() or writer.transport.is_closing():
                self.num_cancelled += 1
                return False
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        self.num_completed += 1
        return True


def answer_text(body: Any) -> str:
    """What a request is answered with: a function of it alone."""
    return " ".join(f"{body.get('prompt')}-{number}" for number in range(body.get("max_tokens", 4)))


def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> bool:
    writer.write(
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (status, len(body), body)
    )
    return True


@asynccontextmanager
async def backends(*names: str) -> AsyncIterator[list[FakeBackend]]:
    """Back ends that listen while the block runs."""
    made = [FakeBackend(name) for name in names]
    for each in made:
        await each.start()
    try:
        yield made
    finally:
        for each in made:
            await each.kill()
        async with asyncio.timeout(10):
            while any(each.num_connections for each in made):  # until all are let go
                await asyncio.sleep(0.005)
