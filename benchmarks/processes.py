"""Child processes of a comparison: the lines of JSON that they answer with, and their standing
still for a moment.

Owns the pipes, what a child says when it fails, and the promise that a stopped process goes on
again, whatever happens here meanwhile. Knows nothing of engines.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.runner import process_tree

_ROOT = Path(__file__).parent.parent
_CLOSE_S, _TERMINATE_S = 30.0, 10.0
_STOP_S = 10.0
"""A process that computes stops within milliseconds;
one that is writing to a disk may take longer."""
_LOOK_S, _ALIVE_S = 0.0005, 1.0
"""So often it is looked whether a process has stopped, and whether it lives."""
_ENDING = (signal.SIGINT, signal.SIGTERM)


class JsonProcess:
    """A child that says something in one line of JSON when it is ready,
    and then answers each line with one."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._is_asked = True
        """Whether an answer is due: it says that it is ready without being asked."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self._errors,
        }
        self._process = subprocess.Popen(command, cwd=_ROOT, env=env, text=True, **pipes)

    @property
    def pid(self) -> int:
        """Of the child; what it has started itself stands below it."""
        return self._process.pid

    def send(self, command: object) -> None:
        """Write one line. RuntimeError with what the child said, if it has ended."""
        assert self._process.stdin is not None
        self._is_asked = True
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def has_answer(self, timeout_s: float) -> bool:
        """Return whether an answer came within so many seconds, or the child has ended."""
        return self._has_line(timeout_s) or self._process.poll() is not None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Read one line. RuntimeError with what the child said, if it ends instead or is silent for
        so long."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        # What the child has started may outlive it with its pipes, so that its end does not show in
        # them.
        while not self.has_answer(_ALIVE_S) and time.monotonic() < deadline:
            pass
        line = self._process.stdout.readline() if self._has_line(0) else ""
        if not line:
            raise self._failure()
        self._is_asked = False
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, and what it has started; once more does no harm."""
        if self._errors.closed:
            return
        try:
            if self._is_asked:  # in the middle of its work
                self._terminate()
            else:
                self._process.communicate(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._terminate()
        self._close_files()

    def _has_line(self, timeout_s: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def _failure(self) -> RuntimeError:
        """Ends the child if it has not ended by itself."""
        try:
            self._process.wait(_ALIVE_S)  # one that closed its output is about to end
        except subprocess.TimeoutExpired:
            self._terminate()
        self._errors.seek(0)
        errors = self._errors.read()[-3000:].decode(errors="replace")
        self._close_files()
        return RuntimeError(
            f"{self.name} failed with exit code {self._process.returncode}:\n{errors}"
        )

    def _terminate(self) -> None:
        """Ask it to end, so that it ends what it has started; kill all of them if it does not."""
        self._process.terminate()
        try:
            self._process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            for pid in list(process_tree(self.pid)):
                _send(pid, signal.SIGKILL)
            self._process.wait()

    def _close_files(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a command that it did not read
                pipe.close()
        self._errors.close()


@contextmanager
def standing_still(root: int) -> Iterator[list[int]]:
    """Within, `root` and all processes below it are stopped; afterwards they go on. Gives their
    ids.

    Signals that would end this process are let through afterwards only. RuntimeError if a process
    does not stop.
    """
    pids: list[int] = []
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        _stop(root, pids)
        yield pids
    finally:
        let_go_on(pids)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def let_go_on(pids: Sequence[int]) -> None:
    """Continue processes; those that are gone are left out."""
    for pid in pids:
        _send(pid, signal.SIGCONT)


def _stop(root: int, pids: list[int]) -> None:
    """Stop all; again, until no process was started meanwhile.
    `pids` always holds all processes that must be continued."""
    deadline = time.monotonic() + _STOP_S
    while new := [pid for pid in process_tree(root) if pid not in pids]:
        pids += new
        for pid in new:
            _send(pid, signal.SIGSTOP)
        while not all(_is_still(pid) for pid in new):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"process {root} and those below it did not stop within {_STOP_S:.0f} s"
                )
            time.sleep(_LOOK_S)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_still(pid: int) -> bool:
    """Return whether no thread of it runs: all are stopped, or gone."""
    return all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").glob("*"))


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:  # the thread has ended meanwhile
        return "X"
