"""The README's snippets, run as they stand: the server is started by its own command, and the clients talk to it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|bash)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SERVE = next(code for language, code in BLOCKS if code.startswith("quire serve "))
LOCAL = [code for language, code in BLOCKS if language == "python" and "localhost" not in code]
CLIENTS = [code for language, code in BLOCKS if "localhost" in code]
DEADLINE_S = 100.0
# One thread, so that tests side by side do not fight; nothing is looked up on the network.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a server listens that was started by the README's command, but for its port: one that is free."""
    words = SERVE.replace("8000", "0").split()
    assert words[0] == "quire" and words[-2:] == ["--port", "0"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen([sys.executable, "-m", *words], env=ENVIRONMENT, stderr=log) as process,
    ):
        try:
            began_s = time.monotonic()
            while not (found := _ready_port(log)):
                assert process.poll() is None and time.monotonic() - began_s < DEADLINE_S
                time.sleep(0.1)
            yield found
        finally:
            process.kill()


def _ready_port(log: TextIO) -> int | None:
    """The port that is told of in the log, once the server is ready."""
    log.seek(0)
    found = re.search(r"listening on http://[^:]+:(\d+)", log.read())
    if found is None:
        return None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/readyz", timeout=60):
            return int(found[1])
    except (OSError, urllib.error.URLError):
        return None


def _run(command: list[str]) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _python(code: str) -> str:
    for module in re.findall(r"^from (\w+)", code, re.MULTILINE):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    return _run([sys.executable, "-W", "error", "-c", code])


def test_the_blocks_are_found() -> None:
    assert len(LOCAL) == 2 and len(CLIENTS) == 4


@pytest.mark.parametrize("code", LOCAL, ids=["llm", "async"])
def test_snippets_that_load_the_model(code: str) -> None:
    assert len(_python(code)) > 40


@pytest.mark.parametrize("code", CLIENTS, ids=["curl", "openai", "langchain", "llama_index"])
def test_snippets_that_ask_the_server(port: int, code: str) -> None:
    code = code.replace("localhost:8000", f"127.0.0.1:{port}")
    if code.startswith("curl"):
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        assert '"finish_reason":' in _run(["sh", "-c", code])
    else:
        assert len(_python(code).split()) > 5
