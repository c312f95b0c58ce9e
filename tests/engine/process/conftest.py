"""A server's side of an engine process: with the null executor, so that one starts in a moment."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import null_engine
import pytest

from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.process.link import supervised
from quire.engine.process.watch import WatchConfig

MakeClient = Callable[..., AbstractAsyncContextManager[Client]]
NULL_ENGINE = (sys.executable, str(Path(null_engine.__file__)))


@pytest.fixture
def make_client(tiny_config: Path) -> MakeClient:
    """Clients of null engines; `watch` are options of `WatchConfig`."""

    @asynccontextmanager
    async def make(**watch: Any) -> AsyncIterator[Client]:
        options: dict[str, Any] = {
            "load_format": "dummy",
            "kv_cache_memory": "2MiB",
            "num_threads": 1,
            "max_num_seqs": 64,
        }
        prepared = prepare_model(EngineConfig(model=str(tiny_config), **options), is_for_here=False)
        client = Client(prepared, supervised(prepared, WatchConfig(**watch), command=NULL_ENGINE))
        client.link.start()
        try:
            yield client
        finally:
            await client.close()

    return make
