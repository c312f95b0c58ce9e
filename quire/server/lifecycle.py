"""A server's life: listen at once, load beside it, serve, drain when told to end, end.

The listening socket is the only one there is. /livez answers before the model is loaded. The first
SIGTERM, SIGINT or SIGHUP refuses new requests and lets those in flight finish, up to the drain
timeout, after which each ends with an error; the second ends everything at once, and further ones
change nothing. A SIGHUP that the server was started to ignore (nohup) is ignored. What the server
says of itself is lost where it cannot be written (a full disk), and nothing else is. Imports no
torch: the model is in the engine's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from quire.common import garbage
from quire.common.failures import log_failure
from quire.config.api import ApiConfig
from quire.config.serve import ServeConfig
from quire.engine.assembly.preparation import PreparedModel
from quire.engine.front.client import Client
from quire.engine.process.watch import WatchConfig
from quire.engine.replicas.link import link_to
from quire.errors import ConfigError, EngineError
from quire.server.api.openai.data_folder import DataFolder
from quire.server.api.prompt_encoder import read_template
from quire.server.http.exhaustion import ExhaustionLog
from quire.server.quota.tenants import KeyRing, read_keys

if TYPE_CHECKING:
    from quire.server.ops.tracing import RequestTracer

logger = logging.getLogger(__name__)

EXIT_DRAINED = 0
EXIT_ABORTED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BACKLOG = 2048
_LAST_WRITES_S = 5.0
"""After the drain, time for clients to take what is left of their answers."""
_POLL_S = 0.05
_OTHER_FILES = 128
"""Files that are no connections: libraries, logs, the engine's channel, uploads on their way."""

Say = Callable[[str], None]


class Settings(NamedTuple):
    """What a server is to be like, besides its model."""

    serve: ServeConfig
    api: ApiConfig
    api_keys: str | None
    """Keys from the environment, separated by commas."""


def run_server(prepared: PreparedModel, settings: Settings, say: Say) -> int:
    """Serve until told to end; the exit code. Raises ConfigError,
    or EngineError if the model cannot be loaded."""
    say = without_errors(say)
    keys = _check(settings.api, settings.api_keys)
    settings = settings._replace(api=with_room_for_connections(settings.api, say))
    tracer = _tracer(settings.api, prepared.planned.plan.config.model)
    try:
        with listen(settings.serve) as listener:
            return asyncio.run(Lifecycle(settings, keys, say, tracer).run(prepared, listener))
    finally:
        end_quietly()
        if tracer is not None:
            tracer.close()


def end_quietly() -> None:
    """Nothing is left that a signal could end sooner,
    and the interpreter forgets handlers of Python's before it is done."""
    for number in _SIGNALS:
        with contextlib.suppress(ValueError):  # not the main thread, which alone has handlers
            signal.signal(number, signal.SIG_IGN)


def without_errors(say: Say) -> Say:
    def quietly(text: str) -> None:
        # a full disk, a reader that is gone, a closed stream
        with contextlib.suppress(OSError, ValueError):
            say(text)

    return quietly


def _check(config: ApiConfig, keys: str | None) -> KeyRing:
    """Return what the operator may have mistaken, before anything is started: keys, files and
    folders. Raises ConfigError."""
    read_template(config.chat_template)
    if config.data_folder is not None:
        DataFolder(config.data_folder).close()
    return read_keys(config, keys)


def with_room_for_connections(config: ApiConfig, say: Say) -> ApiConfig:
    """Return the config with as many connections as this process may open files: a server without a
    file to spare could not accept the connection that it would refuse, nor replace its engine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config
    room = max(1, soft - _OTHER_FILES)
    say(
        f"max_connections is {room}, since this process may open no more than {soft} files "
        "(ulimit -n)"
    )
    return dataclasses.replace(config, max_connections=room)


def _tracer(config: ApiConfig, model: str) -> RequestTracer | None:
    """Return a tracer, where OpenTelemetry's environment enables one. Raises ConfigError."""
    if not any(name.startswith("OTEL_") for name in os.environ):
        return None  # nothing is imported before the model is being loaded
    from quire.server.ops.tracing import tracer_of
    from quire.server.state import model_names

    return tracer_of(os.environ, model_names(config, model)[0])


@contextmanager
def listen(config: ServeConfig) -> Iterator[socket.socket]:
    """Open the listening socket. Raises ConfigError where there can be none."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {reason}; choose another host or port"
        ) from error
    with listener:
        yield listener


class EndSignals:
    """The signals that end a server: the first one tells it to, the second one means at once."""

    def __init__(self) -> None:
        self.has_been_told = asyncio.Event()
        self.is_aborted = asyncio.Event()
        self._num_signals = 0

    def handle(self) -> None:
        """Until the process ends: handlers of the event loop's would go with it,
        and a late signal print a traceback."""
        loop = asyncio.get_running_loop()

        def tell(number: int, frame: object) -> None:
            # the loop is closed: the process is about to end
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.tell)

        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, tell)

    def tell(self) -> None:
        """Note a signal."""
        self._num_signals += 1
        self.has_been_told.set()
        if self._num_signals > 1:
            self.is_aborted.set()
            # it would print a traceback of each task that is cut off
            logging.getLogger("uvicorn.error").disabled = True


class Lifecycle:
    """One server from its first to its last moment."""

    def __init__(
        self, settings: Settings, keys: KeyRing, say: Say, tracer: RequestTracer | None
    ) -> None:
        self._settings = settings
        self._tracer = tracer
        self._keys = keys
        self._say = say
        signals = EndSignals()
        self._signals = signals
        self._has_been_told, self._is_aborted = signals.has_been_told, signals.is_aborted

    async def run(self, prepared: PreparedModel, listener: socket.socket) -> int:
        """Serve on `listener`."""
        config = self._settings.serve
        watch = WatchConfig(
            silence_timeout_s=config.silence_timeout,
            step_timeout_s=config.step_timeout,
            max_restarts=config.max_restarts,
        )
        client = Client(
            prepared, link_to(prepared, watch, has_json_logs=self._settings.api.json_logs)
        )
        client.link.start()  # first of all: the model loads while the rest is imported
        self._signals.handle()
        asyncio.get_running_loop().set_exception_handler(ExhaustionLog())
        try:
            server = self._server(client)
            return await self._serve(client, server, listener)
        finally:
            await client.close()

    async def _serve(self, client: Client, server: uvicorn.Server, listener: socket.socket) -> int:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            host, port = listener.getsockname()[:2]
            self._say(
                f"listening on http://{f'[{host}]' if ':' in host else host}:{port}, loading "
                f"{client.model.name}"
            )
            return await self._live(client, server, serving)
        finally:
            server.should_exit = True
            server.force_exit = self._is_aborted.is_set()
            await client.close()  # first, so that every stream has its last word
            await asyncio.wait([serving], timeout=_LAST_WRITES_S)
            if serving.done() and not serving.cancelled() and serving.exception() is not None:
                log_failure(logger, "the HTTP server failed", serving.exception() or EngineError())

    async def _live(
        self, client: Client, server: uvicorn.Server, serving: asyncio.Task[None]
    ) -> int:
        told = asyncio.create_task(self._has_been_told.wait())
        loading = asyncio.create_task(self._await_model(client))
        await asyncio.wait([told, serving, loading], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await asyncio.wait([told, serving], return_when=asyncio.FIRST_COMPLETED)
        loading.cancel()
        told.cancel()
        return await self._drain(client, server, serving)

    async def _await_model(self, client: Client) -> None:
        """Say when the model is there. Raises EngineError if it cannot be loaded."""
        while (status := client.status()).state != "ready":
            if status.state == "failed":
                raise EngineError(status.reason)
            await asyncio.sleep(_POLL_S)
        garbage.settle()
        self._say("ready")

    async def _drain(
        self, client: Client, server: uvicorn.Server, serving: asyncio.Task[None]
    ) -> int:
        timeout_s, num_requests = self._settings.serve.drain_timeout, client.status().num_requests
        if num_requests:
            self._say(
                f"draining: {num_requests} requests have {timeout_s:g} s to finish; once "
                "more ends them at once"
            )
        draining = asyncio.create_task(client.drain(timeout_s))
        aborted = asyncio.create_task(self._is_aborted.wait())
        await asyncio.wait([draining, aborted], return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            return EXIT_ABORTED
        # takes no more connections, and lets those that are open take the rest
        server.should_exit = True
        await asyncio.wait(
            [serving, aborted], return_when=asyncio.FIRST_COMPLETED, timeout=_LAST_WRITES_S + 1
        )
        aborted.cancel()
        return EXIT_ABORTED if self._is_aborted.is_set() else EXIT_DRAINED

    def _server(self, client: Client) -> uvicorn.Server:
        from quire.server.app import build_app
        from quire.server.http.protocol import uvicorn_config

        config = self._settings.api
        app = build_app(config, client, self._keys, self._tracer)
        return QuietServer(
            uvicorn_config(app, config, timeout_graceful_shutdown=int(_LAST_WRITES_S))
        )


class QuietServer(uvicorn.Server):
    """uvicorn's server without its own ideas about signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
