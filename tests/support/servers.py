"""A whole server in this process for tests: the shipped model, the application,
and uvicorn on a free port, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import uvicorn
from quick_ends import end_soon

from quire.config.api import ApiConfig
from quire.config.engine import EngineConfig
from quire.engine.assembly.builder import build_engine
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.loop.engine_thread import EngineThread
from quire.server.api.generation import Tracer
from quire.server.app import build_app
from quire.server.http.protocol import uvicorn_config
from quire.server.quota.tenants import KeyRing, key_ring

MODEL = "quire-storyteller"


@dataclass(slots=True)
class RunningServer:
    """Where it listens, and the loop that it runs in."""

    port: int
    loop: asyncio.AbstractEventLoop
    client: Client
    server: uvicorn.Server
    errors: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def v1(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def run(self, make: Callable[[], Any]) -> Any:
        """Await `make()` in the server's loop."""

        async def call() -> Any:
            return await make()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(100)


def routes_of(app: Any) -> list[Any]:
    """All routes of the application, which lie behind whatever wraps the router."""
    while not hasattr(app, "routes"):
        app = app._app
    return list(app.routes)


@contextmanager
def local_client(*, model: str = MODEL, **options: Any) -> Iterator[Client]:
    """A model in this process, by default the shipped one."""
    config = EngineConfig.from_options(
        model, {"num_threads": 1, "kv_cache_memory": "48MiB", "max_num_seqs": 64, **options}
    )
    prepared = prepare_model(config, is_for_here=False)
    link = EngineThread(build_engine(config, is_streaming=True))
    link.start()
    try:
        yield Client(prepared, link)
    finally:
        link.close()


@contextmanager
def serve(
    client: Client,
    config: ApiConfig | None = None,
    keys: KeyRing | None = None,
    tracer: Tracer | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """The application over `client`, on a free port."""
    config = config or ApiConfig()
    listener = socket.create_server(("127.0.0.1", 0))
    app = build_app(config, client, keys or key_ring([]), tracer)
    server = uvicorn.Server(uvicorn_config(app, config, timeout_graceful_shutdown=1, **options))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(server.serve(sockets=[listener])), name="test-server"
    )
    thread.start()
    try:
        while not server.started and thread.is_alive():
            threading.Event().wait(0.005)
        yield RunningServer(listener.getsockname()[1], loop, client, server)
    finally:
        end_soon(server, loop)
        thread.join(20)
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        listener.close()


@contextmanager
def held(server: RunningServer) -> Iterator[None]:
    """The model of this server takes in whatever comes,
    and computes nothing of it until the block ends."""
    engine: Any = cast("EngineThread", server.client.link).engine

    def wait() -> list[Any]:
        time.sleep(0.002)
        return []

    engine.step = wait
    try:
        yield
    finally:
        del engine.step


@contextmanager
def serve_model(
    config: ApiConfig | None = None,
    keys: KeyRing | None = None,
    tracer: Tracer | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """The shipped model, served."""
    with local_client(**options) as client, serve(client, config, keys, tracer) as server:
        yield server
