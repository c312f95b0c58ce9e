"""Children that answer in lines, and that stand still exactly as long as they must."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from stopped import has_ended, state_of

from benchmarks import processes
from benchmarks.processes import JsonProcess, let_go_on, standing_still

ECHO = """\
import json, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
child = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(60)"])
print(json.dumps({"child": child.pid}), flush=True)
try:
    for line in sys.stdin:
        if json.loads(line) == "fail":
            sys.exit("out of memory")
        print(json.dumps({"echo": json.loads(line)}), flush=True)
finally:
    child.kill()
    child.wait()
"""


def start(code: str = ECHO) -> JsonProcess:
    return JsonProcess("echo", [sys.executable, "-ISc", code], os.environ)


@pytest.fixture
def echo() -> Iterator[tuple[JsonProcess, list[int]]]:
    """A process, and the ids of it and of its child."""
    process = start()
    child: int = process.answer(60)["child"]
    yield process, [process.pid, child]
    process.close()
    assert has_ended(child)


def test_a_whole_tree_stands_still_and_goes_on(echo: tuple[JsonProcess, list[int]]) -> None:
    process, tree = echo
    with standing_still(process.pid) as pids:
        assert pids == tree and all(state_of(pid) == "T" for pid in tree)
        process.send(1)
        assert not process.has_answer(0.05)
    assert process.answer(60) == {"echo": 1}
    assert all(state_of(pid) not in "TXZ" for pid in tree)


def test_whatever_happens_meanwhile_it_goes_on(echo: tuple[JsonProcess, list[int]]) -> None:
    process, _ = echo
    with pytest.raises(ZeroDivisionError), standing_still(process.pid):
        _ = 1 / 0
    process.send(2)
    assert process.answer(60) == {"echo": 2}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_until_it_goes_on(
    echo: tuple[JsonProcess, list[int]], number: signal.Signals
) -> None:
    process, _ = echo
    seen: list[str] = []

    def end(*_: object) -> None:
        seen.append(state_of(process.pid))
        raise SystemExit

    before = signal.signal(number, end)
    try:
        with pytest.raises(SystemExit), standing_still(process.pid):
            signal.raise_signal(number)
            seen.append("to the end")
    finally:
        signal.signal(number, before)
    assert seen[0] == "to the end" and seen[1] != "T"
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_that_dies_meanwhile_says_why_afterwards(
    echo: tuple[JsonProcess, list[int]],
) -> None:
    process, tree = echo
    with standing_still(process.pid):
        os.kill(process.pid, signal.SIGKILL)
    with ExitStack() as stack:
        stack.callback(os.kill, tree[1], signal.SIGKILL)  # nobody else does it now
        with pytest.raises(RuntimeError, match="echo failed with exit code -9"):
            process.answer(60)
    with standing_still(process.pid):  # that it is gone is no error here
        pass


def test_a_process_that_fails_says_why() -> None:
    process = start()
    process.answer(60)
    process.send("fail")
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*out of memory"):
        process.answer(60)


def test_a_process_that_is_gone_is_told_nothing() -> None:
    process = start("print('{}', flush=True)")
    assert process.answer(60) == {}
    process._process.wait(60)
    with pytest.raises(RuntimeError, match="exit code 0"):
        process.send(1)


def test_nobody_misses_a_process_that_is_gone() -> None:
    process = start("pass")
    process._process.wait(60)
    process.close()
    let_go_on([process.pid])


@pytest.mark.parametrize(
    "signals", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"]
)
def test_a_process_in_the_middle_of_its_work_is_not_waited_for(
    signals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_TERMINATE_S", 0.2)
    process = start(
        signals + ECHO.replace("if json.loads", "time.sleep(60)\n        if json.loads")
    )
    child = process.answer(60)["child"]
    process.send(1)
    started = time.monotonic()
    process.close()
    assert time.monotonic() - started < processes._CLOSE_S
    if signals:
        assert has_ended(child)  # killed with it
    else:
        # plain SIGTERM leaves it no chance to end its child; peers.runner has a handler
        os.kill(child, signal.SIGKILL)
