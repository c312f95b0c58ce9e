"""`quire serve` as a process: where it listens, that it answers while it loads, how it ends, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

OPTIONS = ["quire-storyteller", "--num-threads", "1", "--kv-cache-memory", "48MiB", "--port", "0"]
DEADLINE_S = 60.0


class Served(NamedTuple):
    process: subprocess.Popen[str]
    url: str


@contextmanager
def _serving(*options: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "quire", "serve", *OPTIONS, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "listening on http://" in line, line
            yield Served(process, line.split()[3].rstrip(","))
        finally:
            process.kill()


def _get(served: Served, path: str) -> int:
    return httpx.get(f"{served.url}{path}", timeout=10).status_code


def _await_ready(served: Served) -> None:
    began_s = time.monotonic()
    while _get(served, "/readyz") != 200:
        assert time.monotonic() - began_s < DEADLINE_S
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def _listening_inodes(pid: int) -> list[str]:
    """Ports on which a process listens."""
    fds = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    mine = {name[8:-1] for name in fds if name.startswith("socket:[")}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return [line[1] for line in lines if line[3] == "0A" and line[9] in mine]


def _stream(served: Served, max_tokens: int) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}

    def read() -> None:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            lines.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    while not lines and thread.is_alive():
        time.sleep(0.005)
    return thread, lines


def test_it_answers_while_it_loads_listens_once_and_drains_when_told() -> None:
    with _serving() as served:
        assert _get(served, "/livez") == 200
        _await_ready(served)
        [engine] = [child for child in _children(served.process.pid)]
        assert len(_listening_inodes(served.process.pid)) == 1
        assert _listening_inodes(engine) == []
        thread, lines = _stream(served, 400)
        served.process.send_signal(signal.SIGTERM)
        refusals = set()
        while thread.is_alive() and 503 not in refusals:
            refusals.add(_get(served, "/readyz"))
        refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, timeout=10)
        thread.join()
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert lines[-1] == "data: [DONE]" and not any("error" in json.loads(line[6:]) for line in lines[:-1])
        assert served.process.wait(DEADLINE_S) == 0
        assert not Path(f"/proc/{engine}").exists()


def test_a_drain_that_is_too_short_ends_streams_with_an_error_and_the_engine_dies_with_its_server() -> None:
    with _serving("--drain-timeout", "0") as served:
        _await_ready(served)
        thread, lines = _stream(served, 400)
        served.process.send_signal(signal.SIGTERM)
        thread.join(DEADLINE_S)
        assert served.process.wait(DEADLINE_S) == 0
        assert any("error" in json.loads(line[6:]) for line in lines if line.startswith("data: {"))
    with _serving() as served:
        _await_ready(served)
        [engine] = _children(served.process.pid)
        served.process.kill()
        began_s = time.monotonic()
        while Path(f"/proc/{engine}").exists() and "Z" not in Path(f"/proc/{engine}/stat").read_text().rsplit(")")[-1]:
            assert time.monotonic() - began_s < 10
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "port=70000"),
        (["--drain-timeout", "-1"], "drain_timeout=-1.0"),
        (["--max-model-len", "100000000"], "max_model_len"),
        (["--prot", "1"], "did you mean --port"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "quire", "serve", *OPTIONS[:-2], *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
