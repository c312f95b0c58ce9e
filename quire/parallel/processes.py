"""The processes of the other ranks: started, watched, ended, and started anew.

A rank is told what to build by one line of JSON on its standard input, gives signs of life while it
does so, each an empty object on a line of its standard output, and then answers with a line that
says that it is ready, or why it is not. It lives as long as its input stays open: it ends with the
process that started it, however that ended.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Protocol

from quire.common.watch_clock import WatchClock
from quire.errors import ConfigError, EngineError
from quire.parallel.fork_server import SharedServer

BEAT_INTERVAL_S = 0.25
LOADING_SILENCE_S = 60.0
"""That a rank may be silent while it is loading, or longer, where it may be longer while it is
computing: torch alone has taken 6 s to import on a busy machine, which is not interrupted."""
_LOOK_INTERVAL_S = 0.05
_MOST_COUNTED_S = 0.1
"""Of silence between two looks."""
_KILL_TIMEOUT_S = 10.0
_MAX_ANSWER_CHARS = 1 << 16


class RankHandle(Protocol):
    """A rank that was started, wherever it is."""

    @property
    def pid(self) -> int:
        """The number that the rank's own system gives it; 0 until it is known."""

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be gone, from what has been told already."""

    def look(self) -> bool:
        """Return whether it is ready. Raises ConfigError with what it says, EngineError where it
        has ended without a word."""

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until it is. Raises as `look`, and EngineError where it is not by then."""

    def kill(self) -> None:
        """End it, frozen or not."""


class RankPlaces(Protocol):
    """Where the ranks of a group run."""

    host: str | None
    """The address at which they reach the first process; None where they inherit its memory."""

    def start(self, start: Mapping[str, Any], filenos: Sequence[int]) -> RankHandle:
        """Start a rank, and return at once. Raises EngineError where it cannot be."""

    def settle(self) -> None:
        """Prepare, in the background, for ranks to be started anew: those that were are ready."""

    def close(self) -> None:
        """Give back what was taken for them. Idempotent."""


class Process(Protocol):
    """What is needed of a process, as `subprocess.Popen` has it."""

    pid: int

    @property
    def stdin(self) -> IO[bytes] | None:
        """The pipe to its standard input."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """The pipe from its standard output."""

    def poll(self) -> int | None:
        """Return None while it runs."""

    def wait(self, timeout: float) -> int:
        """Wait until it has ended. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """End it, unless it has ended."""


class LocalPlaces:
    """Processes of this host. Implements `RankPlaces`."""

    def __init__(
        self, command: Sequence[str], host: str | None = None, *, can_fork: bool = False
    ) -> None:
        """With a `host`, they share no memory, and have this address, too. `can_fork`: `command`
        makes a fork server, too, which starts them once it is there."""
        self._command, self.host, self._can_fork = tuple(command), host, can_fork
        self._server: SharedServer | None = None

    def start(self, start: Mapping[str, Any], filenos: Sequence[int]) -> RankProcess:
        process: Process | None = None
        try:
            if self._can_fork:
                process = SharedServer.fork(self._command, filenos)
            if process is None:
                process = spawn(self._command, filenos)
        except OSError as error:
            raise EngineError(f"a rank cannot be started: {type(error).__name__}") from error
        return RankProcess(process, {**start, "host": self.host})

    def settle(self) -> None:
        """See `RankPlaces.settle`."""
        if self._server is not None:
            self._server.prepare()
        elif self._can_fork:
            self._server = SharedServer(self._command)

    def close(self) -> None:
        """See `RankPlaces.close`."""
        if self._server is not None:
            self._server.release()


def spawn(command: Sequence[str], filenos: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a rank's process by its command. Raises OSError."""
    return subprocess.Popen(
        list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
        pass_fds=filenos,
        # not the terminal's, whose Ctrl-C is for this process; but of its session, so that
        # the system wakes a rank that is stopped when this process ends, and it ends, too
        process_group=0,
    )  # fmt: skip


class RankProcess:
    """One rank's process on this host. Implements `RankHandle`."""

    def __init__(self, process: Process, start: Mapping[str, Any]) -> None:
        """Tell a process what to build."""
        self._process = process
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_ready = False
        self._patience_s = max(LOADING_SILENCE_S, start.get("silence_s", 0.0))
        self._clock = WatchClock(_MOST_COUNTED_S)
        self._last_sign_s = self._clock()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, as will be noticed
            self._process.stdin.write(json.dumps(start).encode() + b"\n")
            self._process.stdin.flush()
        threading.Thread(target=self._listen, name="quire-rank-answer", daemon=True).start()

    @property
    def pid(self) -> int:
        """The operating system's number."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def look(self) -> bool:
        """See `RankHandle.look`."""
        return self._look(0.0)

    def wait_ready(self, deadline_s: float) -> None:
        """See `RankHandle.wait_ready`."""
        while not self._look(_LOOK_INTERVAL_S):
            if time.monotonic() > deadline_s:
                raise EngineError(f"a rank is not loaded in time (process {self.pid})")

    def _look(self, timeout_s: float) -> bool:
        while not self._is_ready:
            try:
                line = self._answers.get(timeout=timeout_s)
            except queue.Empty:
                self._check_silence()
                break
            self._last_sign_s = self._clock()
            if not line:
                raise EngineError(f"a rank ended while it was loading (process {self.pid})")
            answer = json.loads(line)
            if "error" in answer:
                is_final = answer.get("is_final", True)
                raise (ConfigError if is_final else EngineError)(str(answer["error"]))
            self._is_ready = bool(answer.get("ready"))
        return self._is_ready

    def _check_silence(self) -> None:
        silent_s = self._clock() - self._last_sign_s
        if silent_s > self._patience_s:
            raise EngineError(
                f"a rank gave no sign of life for {silent_s:.0f} s while it was loading "
                f"(process {self.pid})"
            )

    def kill(self) -> None:
        """End it, frozen or not, and wait until the system has taken back what it held."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # closed by `kill`
            while line := self._process.stdout.readline(_MAX_ANSWER_CHARS):
                self._answers.put(line)
            self._answers.put(b"")


class Watcher:
    """A thread that gives this rank's signs of life and says which processes have ended."""

    def __init__(self, beat: Callable[[], None], has_ended: Callable[[], None]) -> None:
        """`has_ended`, a method, looks for such processes, and says so to those who wait for them.
        Its object is not kept by this."""
        self._beat, self._look = beat, weakref.WeakMethod(has_ended)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_over.set()
        if threading.current_thread() is not self._thread:  # where it was the last to hold a group
            self._thread.join(_KILL_TIMEOUT_S)

    def _run(self) -> None:
        next_beat_s = 0.0
        while not self._is_over.wait(_LOOK_INTERVAL_S):
            if time.monotonic() >= next_beat_s:
                self._beat()
                next_beat_s = time.monotonic() + BEAT_INTERVAL_S
            look = self._look()
            if look is None:
                return
            look()
            del look
