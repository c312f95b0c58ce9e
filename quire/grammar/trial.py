"""A process in which grammars are compiled on trial, because it can be ended.

Nothing else bounds what the library may do: the intersection of thirty regular expressions costs it
hours in one step, which its own counters of work do not see. The process has limits of processor
time for each grammar and of memory, set by the operating system; where it exceeds one it is gone,
and the next grammar starts another. Serves one thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Final

from quire.core.grammars import Grammar
from quire.errors import EngineError

MAX_COST_S: Final = 1.0
"""Processor time to compile a grammar and take its first step;
the engine will spend as much of a step on it."""
MAX_WAIT_S: Final = 10.0
"""For the verdict on one grammar, by the clock."""
MAX_BYTES: Final = 2 << 30
"""Address space of the process: its deep stack takes 256 MiB, the costliest grammars that are
accepted some 400 more."""
_COMMAND: Final = (sys.executable, "-P", "-m", "quire.grammar.trial_process")
_READ_BYTES: Final = 1 << 16
_MAX_REPLY_BYTES: Final = 1 << 20


class TrialError(EngineError):
    """A grammar was not tried, for reasons that are not its own."""


class Trial:
    """The process, which starts with the first grammar."""

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        """Held while `_process` changes."""
        self._is_closed = False

    def judge(self, grammar: Grammar) -> str | None:
        """Return what is wrong with a grammar, or None. Raises TrialError where that was not found
        out."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        question = json.dumps([grammar.kind, grammar.text]).encode() + b"\n"
        try:
            process.stdin.write(question)
            process.stdin.flush()
            error, seconds = _reply(process.stdout)
        except TimeoutError:
            self._end()
            raise TrialError(f"a grammar was not compiled within {MAX_WAIT_S:g} s") from None
        except (OSError, ValueError):
            return self._died()
        if error is None and seconds > MAX_COST_S:
            return _TOO_COSTLY
        return error

    def close(self) -> None:
        """End the process for good. Idempotent, for any thread."""
        self._is_closed = True
        self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
            if self._is_closed:
                raise TrialError("grammars are no longer compiled here")
            try:
                self._process = subprocess.Popen(
                    [*self._command, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,  # a terminal's Ctrl-C is not for it
                )
            except OSError as error:
                raise TrialError(
                    f"the process that compiles grammars cannot be started: {type(error).__name__}"
                ) from error
            return self._process

    def _died(self) -> str:
        code = self._end()
        if self._is_closed:
            raise TrialError("grammars are no longer compiled here")
        if code == -signal.SIGXCPU:
            return _TOO_COSTLY
        if code in (-signal.SIGKILL, -signal.SIGTERM):  # by the system or an operator
            raise TrialError("the process that compiles grammars was killed")
        return "structured_outputs: the grammar cannot be compiled (the compiler ended)"

    def _end(self) -> int:
        """End the process, if there is one; its exit status, where it ended by itself."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
        return code


_TOO_COSTLY = (
    f"structured_outputs: the grammar takes more than {MAX_COST_S:g} s to compile and begin"
)
_GRACE_S = 0.2
"""For a process whose input has ended to end, too: the time from its last write to its status."""


def _reply(pipe: IO[bytes]) -> tuple[str | None, float]:
    """Read a verdict and its cost. Raises TimeoutError, or ValueError at the pipe's end."""
    poll, deadline_s = select.poll(), time.monotonic() + MAX_WAIT_S
    poll.register(pipe.fileno(), select.POLLIN)
    data = b""
    while not data.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(math.ceil(1000 * left_s)):
            raise TimeoutError
        piece = os.read(pipe.fileno(), _READ_BYTES)
        data += piece
        if not piece or len(data) > _MAX_REPLY_BYTES:
            raise ValueError("no verdict")
    error, seconds = json.loads(data)
    if not isinstance(error, str | None) or not isinstance(seconds, float):
        raise ValueError("no verdict")
    return error, seconds
