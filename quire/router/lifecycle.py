"""A router's life: listen, route, drain when told to end, end. The server's without an engine."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import NamedTuple

import uvicorn

from quire.common.failures import log_failure
from quire.config.api import ApiConfig
from quire.config.route import RouteConfig
from quire.config.serve import ServeConfig
from quire.router.app import RouterApp, check, is_loopback
from quire.server.http.exhaustion import ExhaustionLog
from quire.server.http.protocol import uvicorn_config
from quire.server.lifecycle import (
    EXIT_ABORTED,
    EXIT_DRAINED,
    EndSignals,
    QuietServer,
    end_quietly,
    listen,
    with_room_for_connections,
    without_errors,
)
from quire.server.quota.tenants import KeyRing, read_keys

logger = logging.getLogger(__name__)

_LAST_WRITES_S = 5.0
_POLL_S = 0.05


class RouteSettings(NamedTuple):
    """What a router is to be like."""

    config: RouteConfig
    api_keys: str | None
    """Keys from the environment, separated by commas."""


def run_router(settings: RouteSettings, say: Callable[[str], None]) -> int:
    """Route until told to end; the exit code. Raises ConfigError."""
    say, config = without_errors(say), settings.config
    check(config)
    keys = read_keys(config.api(), settings.api_keys)
    api = with_room_for_connections(config.api(), say)
    try:
        with listen(ServeConfig(host=config.host, port=config.port)) as listener:
            return asyncio.run(_RouterLifecycle(config, api, keys, say).run(listener))
    finally:
        end_quietly()


class _RouterLifecycle:
    """One router from its first to its last moment."""

    def __init__(
        self, config: RouteConfig, api: ApiConfig, keys: KeyRing, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._api = api
        self._keys = keys
        self._say = say
        self._signals = EndSignals()

    async def run(self, listener: socket.socket) -> int:
        """Route on `listener`."""
        signals = self._signals
        signals.handle()
        asyncio.get_running_loop().set_exception_handler(ExhaustionLog())
        app = RouterApp(self._config, self._keys, signals.tell)
        server = QuietServer(
            uvicorn_config(app.asgi, self._api, timeout_graceful_shutdown=int(_LAST_WRITES_S))
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            self._announce(listener)
            told = asyncio.create_task(signals.has_been_told.wait())
            await asyncio.wait([told, serving], return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            return await self._drain(app, server, serving)
        finally:
            server.should_exit, server.force_exit = True, signals.is_aborted.is_set()
            await asyncio.wait([serving], timeout=_LAST_WRITES_S + 1)
            if serving.done() and not serving.cancelled() and serving.exception() is not None:
                log_failure(logger, "the HTTP server failed", serving.exception() or OSError())

    def _announce(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        config = self._config
        self._say(
            f"listening on http://{shown}:{port}, routing to {len(config.backend)} "
            f"back ends ({config.policy})"
        )
        if self._keys.is_open and not is_loopback(config.host):
            self._say("requests need no API key here (--api-keys-file); the admin calls are off")

    async def _drain(
        self, app: RouterApp, server: uvicorn.Server, serving: asyncio.Task[None]
    ) -> int:
        """Let what is in flight finish, within the time for it."""
        app.drain()
        loop, aborted = asyncio.get_running_loop(), self._signals.is_aborted
        until_s = loop.time() + self._config.drain_timeout
        if app.num_in_flight:
            self._say(
                f"draining: {app.num_in_flight} requests have {self._config.drain_timeout:g} s to "
                "finish; once more ends them at once"
            )
        while app.num_in_flight and loop.time() < until_s and not aborted.is_set():
            await asyncio.sleep(_POLL_S)
        is_done = not app.num_in_flight
        app.fleet.close()
        server.should_exit = True
        await asyncio.wait([serving], timeout=_LAST_WRITES_S + 1)
        return EXIT_DRAINED if is_done else EXIT_ABORTED
