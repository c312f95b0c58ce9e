"""One server for all tests of the API that need no settings of their own, and one as a process;
clients on them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from served import Served, serving
from servers import RunningServer, serve_model

# httpx gives up after five seconds by default, which a busy machine may need; all its functions
# share this object.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(
    dict.fromkeys(("connect", "read", "write", "pool"), 60.0)
)

KEYS = "first=sk-key-of-first,second=sk-key-of-second"


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The shipped model behind the API, open to everyone."""
    with serve_model() as running:
        yield running


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`quire serve` as it is run in earnest: two processes, two tenants, a folder for files.
    Whoever uses it leaves it idle."""
    folder = tmp_path_factory.mktemp("data")
    with serving("--data-folder", str(folder), "--max-file-bytes", "100000", keys=KEYS) as running:
        running.await_ready()
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client, without retries."""
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
