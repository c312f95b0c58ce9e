"""A router in the test's own event loop, on a free port."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from quick_ends import end_soon

from quire.common.event_reader import EventReader
from quire.common.http_client import HttpClient, HttpRequest, HttpResponse
from quire.config.route import RouteConfig
from quire.router.app import RouterApp
from quire.server.http.protocol import uvicorn_config
from quire.server.lifecycle import QuietServer
from quire.server.quota.tenants import KeyRing, key_ring


@dataclass(slots=True)
class Routed:
    """The router, and a client on it."""

    app: RouterApp
    url: str
    client: HttpClient
    told: list[str]

    async def get(self, path: str, **headers: str) -> HttpResponse:
        """Ask."""
        return await self.client.request(HttpRequest("GET", path, headers=_named(headers)))

    async def post(self, path: str, body: Any, **headers: str) -> HttpResponse:
        """Send JSON."""
        data = json.dumps(body).encode()
        return await self.client.request(HttpRequest("POST", path, data, _named(headers)))

    async def delete(self, url: str) -> HttpResponse:
        """Remove a back end."""
        return await self.client.request(HttpRequest("DELETE", f"/admin/backends?url={url}"))

    async def stream(self, body: Any, **headers: str) -> list[Any]:
        """Send a completion request; its events, `[DONE]` among them as a string."""
        events: list[Any] = []
        reader = EventReader(
            lambda data: events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
        )
        data = json.dumps({**body, "stream": True}).encode()
        request = HttpRequest("POST", "/v1/completions", data, _named(headers))
        answer = await self.client.request(request, reader)
        if answer.status != 200:
            events.append(json.loads(answer.body))
        return events


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def words(events: Sequence[Any]) -> str:
    """The text of a stream that was not disturbed."""
    assert events[-1] == "[DONE]", events[-3:]
    return " ".join(event["word"] for event in events[:-1])


@asynccontextmanager
async def routed(*urls: str, keys: KeyRing | None = None, **options: Any) -> AsyncIterator[Routed]:
    """A router over these back ends, once it has probed them."""
    config = RouteConfig(backend=urls, **{"health_interval_s": 0.2, **options})
    told: list[str] = []
    app = RouterApp(config, keys or key_ring([]), lambda: told.append("end"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = QuietServer(uvicorn_config(app.asgi, config.api(), timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        async with HttpClient(url, timeout_s=30.0) as client:
            yield Routed(app, url, client, told)
    finally:
        end_soon(server, asyncio.get_running_loop())
        await serving
        listener.close()
