"""A replica: an engine in a process of its own, and the server's routes in front of it.

The engine is supervised as that of `quire serve` is: where it dies it is replaced, and its streams
go on. Where it cannot be, the replica is unhealthy, and Serve replaces all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from typing import Any

import ray

from quire.config.serve import ServeConfig
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.process.watch import WatchConfig
from quire.engine.replicas.link import link_to
from quire.errors import EngineError
from quire.parallel.ray_places import BY_ID
from quire.ray.autoscaling import METRIC
from quire.ray.exchange import Message, Request, run
from quire.ray.settings import RaySettings
from quire.server.app import build_app
from quire.server.quota.tenants import read_keys

_POLL_S = 0.05
_LIFESPAN_TIMEOUT_S = 30.0


class EngineReplica:
    """What Serve calls a deployment's class. All methods run in one event loop."""

    async def __init__(self, settings: RaySettings) -> None:  # type: ignore[misc]  # Serve awaits it
        """Return once the model is loaded. Raises EngineError where it cannot be."""
        loop, options = asyncio.get_running_loop(), _placement(settings)
        config = settings.engine_config(**options)
        prepared = await loop.run_in_executor(
            None, lambda: prepare_model(config, is_for_here=False)
        )
        api, watch = settings.api_config, ServeConfig()
        keys = read_keys(api, os.environ.get("QUIRE_API_KEYS"))
        self._drain_timeout_s = watch.drain_timeout
        self._client = Client(
            prepared,
            link_to(
                prepared,
                WatchConfig(
                    silence_timeout_s=watch.silence_timeout, step_timeout_s=watch.step_timeout,
                    max_restarts=watch.max_restarts,
                ),
            ),
        )  # fmt: skip
        self._client.link.start()
        self._app = build_app(api, self._client, keys)
        self._lifespan = _Lifespan(self._app)
        await self._lifespan.begin()
        while (status := self._client.status()).state != "ready":
            if status.state == "failed":
                raise EngineError(status.reason)
            await asyncio.sleep(_POLL_S)

    async def forward(self, request: Request) -> AsyncGenerator[Any, None]:
        """Answer a request; see `quire.ray.exchange.run`."""
        answer = run(self._app, request)
        async with contextlib.aclosing(answer):
            async for piece in answer:
                yield piece

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Say what `WaitingTokens` reads."""
        return {METRIC: float(self._app.num_tokens_waiting)}

    async def check_health(self) -> None:
        """Raise where this replica will answer nothing any more."""
        status = self._client.status()
        if status.state == "failed":
            raise EngineError(status.reason)

    async def __del__(self) -> None:
        """Serve has stopped sending requests here, and calls this before the process ends."""
        client = self.__dict__.get("_client")
        if client is not None:
            await client.drain(self._drain_timeout_s)
            await self._lifespan.end()
            await client.close()


class _Lifespan:
    """The application's start and end, as ASGI has them."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._asked: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Raises EngineError where the application does not start."""
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._task = asyncio.create_task(self._app(scope, self._asked.get, self._answers.put))
        await self._asked.put({"type": "lifespan.startup"})
        answer = await asyncio.wait_for(self._answers.get(), _LIFESPAN_TIMEOUT_S)
        if answer["type"] != "lifespan.startup.complete":
            raise EngineError(f"the server's routes do not start: {answer.get('message', '')}")

    async def end(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await self._asked.put({"type": "lifespan.shutdown"})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(task, _LIFESPAN_TIMEOUT_S)


def _placement(settings: RaySettings) -> dict[str, Any]:
    """Return how the engine's process, which is no actor, finds the cluster and the bundles of this
    replica's group."""
    if settings.engine_config().num_processes == 1:
        return {}
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    group = ray.util.get_current_placement_group()
    return {} if group is None else {"ray_placement_group": BY_ID + group.id.hex()}
