"""One server for all tests of the API that need no settings of their own, and one as a process;
clients on them."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

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


def _with_usual_ssl_context(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    usual = cache(create)

    def make(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        """Read the certificates of all authorities once, and not for each client, which takes
        longer than most tests."""
        if verify is True and cert is None and trust_env:
            return usual()
        return create(verify=verify, cert=cert, trust_env=trust_env)

    return make


for _name in ("httpx", "httpx2"):  # OpenAI's clients are on the latter, or on both
    if _name not in sys.modules:
        continue
    _transports = sys.modules[f"{_name}._transports.default"]
    vars(_transports)["create_ssl_context"] = _with_usual_ssl_context(
        _transports.create_ssl_context
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


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client, without retries. It keeps nothing of what was asked, and takes longer to
    make than most answers do."""
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
