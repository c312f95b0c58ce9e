"""A router follows what a real server caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from routed import routed
from servers import serve_model

from quire.config.api import ApiConfig
from quire.router.asks import AskReader
from quire.routing.observed import ObservedMemory
from quire.server.quota.tenants import Tenant, key_ring

BODY = {"prompt": "Once upon a time there was a girl. " * 40, "max_tokens": 2}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_router_knows_what_a_server_has_cached_and_what_it_has_not() -> None:
    async def scene(url: str) -> None:
        async with routed(url) as up, httpx.AsyncClient(base_url=url, timeout=60) as direct:
            (replica,) = up.app.fleet.replicas
            memory = up.app.fleet.memory(replica)
            assert isinstance(memory, ObservedMemory)
            await until(lambda: memory.is_followed)
            answer = await up.post("/v1/completions", BODY)
            assert answer.status == 200
            sent = httpx.Request("POST", url, json=BODY).content
            chunks = AskReader(512, "x").read({}, sent, "default").ask.chunks
            assert len(chunks) == 2
            await until(lambda: len(memory) > 20 and not memory.num_under_way)
            assert memory.match(chunks) == 2
            assert (await direct.delete("/v1/cache")).json()["num_blocks"] > 20
            await until(lambda: len(memory) == 0)
            assert memory.match(chunks) == 0
            for path in ("/v1/kv_events", "/v1/cache"):
                assert (await up.get(path)).status == 404, "not for a router's clients"

    with serve_model() as server:
        asyncio.run(scene(server.url))


def test_a_server_that_tells_other_keys_only_is_guessed_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(url: str) -> None:
        async with routed(url, backend_api_key="low-secret") as up:
            (replica,) = up.app.fleet.replicas
            memory = up.app.fleet.memory(replica)
            assert memory is not None
            assert (await up.post("/v1/completions", BODY)).status == 200
            sent = httpx.Request("POST", url, json=BODY).content
            chunks = AskReader(512, "x").read({}, sent, "default").ask.chunks
            assert memory.match(chunks) == 2
            await until(lambda: "to admin keys alone" in caplog.text)
            assert memory.match(chunks) == 2 and not memory.is_followed

    keys = key_ring(
        [(Tenant("boss", is_admin=True), ["top-secret"]), (Tenant("user"), ["low-secret"])]
    )
    with serve_model(ApiConfig(), keys) as server:
        asyncio.run(scene(server.url))
