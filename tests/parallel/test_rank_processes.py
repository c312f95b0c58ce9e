"""The process of a rank, with a script in place of a model: what it says while it is loading, and
that it ends with the process that started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from served import until
from stopped import has_ended, state_of

from quire.errors import ConfigError, EngineError
from quire.parallel import processes
from quire.parallel.processes import RankProcess, spawn


@contextmanager
def rank(script: str) -> Iterator[RankProcess]:
    process = RankProcess(spawn((sys.executable, "-c", f"import json, time\n{script}"), ()), {})
    try:
        yield process
    finally:
        process.kill()


def test_a_process_that_cannot_be_built_says_why_at_whatever_length() -> None:
    script = "print('{}'); print(json.dumps({'error': 'é' * 4096, 'is_final': True}))"
    with rank(script) as process, pytest.raises(ConfigError, match=r"^é{4096}$"):
        process.wait_ready(time.monotonic() + 60.0)


def test_one_that_may_be_built_the_next_time_is_no_mistake_of_its_options() -> None:
    script = "print(json.dumps({'error': 'another rank is gone', 'is_final': False}))"
    with rank(script) as process, pytest.raises(EngineError, match="another rank is gone"):
        process.wait_ready(time.monotonic() + 60.0)
    with rank("print('{}')") as process, pytest.raises(EngineError, match="ended while it was lo"):
        process.wait_ready(time.monotonic() + 60.0)


def test_one_that_says_nothing_while_it_is_loading_is_lost_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = "for _ in range(40): print('{}', flush=True); time.sleep(0.05)\nprint('{\"ready\": 1}')"
    monkeypatch.setattr(processes, "LOADING_SILENCE_S", 20.0)
    with rank(slow) as process:
        monkeypatch.setattr(process, "_patience_s", 1.9)
        process.wait_ready(time.monotonic() + 60.0)
    monkeypatch.setattr(processes, "LOADING_SILENCE_S", 0.5)
    with (
        rank("print('{}', flush=True); time.sleep(600)") as process,
        pytest.raises(EngineError, match=r"gave no sign of life for . s while it was loading"),
    ):
        process.wait_ready(time.monotonic() + 60.0)


PARENT = """
import os, signal, sys, time
from quire.parallel.processes import RankProcess, spawn
serve = "import sys; print('{\\"ready\\": true}', flush=True); sys.stdin.read()"
process = RankProcess(spawn((sys.executable, "-c", serve), ()), {})
process.wait_ready(time.monotonic() + 60.0)
os.kill(process.pid, signal.SIGSTOP)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_a_stopped_one_ends_with_the_process_that_started_it() -> None:
    """Whose end it does not notice itself, and which kills it no more."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: state_of(pid) == "T")
        parent.send_signal(signal.SIGKILL)
    assert has_ended(pid)
