"""A process that has imported what ranks need, and forks them: one that takes the place of a lost
rank begins to load at once, where importing torch anew takes seconds.

The processes' ends meet in a socket of packets. The server says `ready` when it has imported
everything; then each request, which brings the descriptors of a rank's standard streams and of the
memory that it shares, is answered with the rank's number and a descriptor of its process. A server
that has ended, or that does not answer in time, is given up: it is an optimisation, and ranks can
always be started without it. Linux only (process descriptors).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, ClassVar

FORK = "--fork"
"""Before the descriptor of its end: what makes a server of a rank's command."""
FORK_TIMEOUT_S = 5.0
"""A fork takes 13 ms (median of 20, two Zen 3 cores)."""
_END_TIMEOUT_S = 10.0
_REAP_TIMEOUT_S = 1.0
_NICENESS = 10
"""Of the thread that imports: the engine that it is for has its ranks already, and serves."""
_MAX_PACKET = 1 << 17
_READ_AT_IMPORT = (
    "ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_",
    "PATH", "PYTHON", "QUIRE_", "TORCH_", "VIRTUAL_ENV",
)  # fmt: skip
"""Variables of the environment, by the beginnings of their names, that libraries may have read when
they were loaded. The others are set anew in each rank."""


def can_fork() -> bool:
    """Return whether this system has what a server needs."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux; an old one, or one that forbids it
        return False
    return True


class ForkedProcess:
    """A process that a server has forked: what is needed of `subprocess.Popen`."""

    def __init__(self, pid: int, fileno: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        """Of the process's descriptor `fileno`, this is the owner from now on."""
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._fileno = fileno
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return None while it runs, and then 0: how it ended is its parent's to know."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._status

    def wait(self, timeout: float) -> int:
        """Wait until it has ended. Raises subprocess.TimeoutExpired where it has not by then."""
        with self._lock:
            if self._status is None:
                poller = select.poll()
                poller.register(self._fileno, select.POLLIN)
                if not poller.poll(timeout * 1e3):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
                self._wait_reaped()
                self._status = 0
                os.close(self._fileno)
            return self._status

    def _wait_reaped(self) -> None:
        """Wait until its parent has taken note, so that nothing of it is seen any more."""
        give_up_s = time.monotonic() + _REAP_TIMEOUT_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < give_up_s:
                signal.pidfd_send_signal(self._fileno, 0)
                time.sleep(1e-3)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._fileno, signal.SIGKILL)


class ForkServer:
    """This process's end of a server. For any number of threads."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it, and return at once. Raises OSError where it cannot be started. `command` is
        given the descriptor of the server's end."""
        self._environment = _of_import()
        self._is_ready = False
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())], stdin=subprocess.DEVNULL, cwd="/",
                    pass_fds=(theirs.fileno(),), process_group=0,
                )  # fmt: skip
            except OSError:
                self._socket.close()
                raise

    @property
    def pid(self) -> int:
        """The server's number."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it is there, or will be, and imports in this environment."""
        return self._process.poll() is None and self._environment == _of_import()

    def wait_ready(self, timeout_s: float) -> bool:
        """Return whether it has imported everything, after so long at most."""
        with self._lock:
            return self._wait_ready(timeout_s)

    def fork(self, filenos: Sequence[int]) -> ForkedProcess | None:
        """Fork a rank that has these descriptors, by the same numbers; None where the server is
        not ready, or gone, the environment is not the one that it has imported in, or is more than
        a packet holds. Raises OSError where this process has no descriptors left."""
        with self._lock:
            request = json.dumps({"filenos": list(filenos), "environment": dict(os.environ)})
            if (
                not self._wait_ready(0.0)
                or self._environment != _of_import()
                or len(request) > _MAX_PACKET
            ):
                return None
            ends: list[int] = []  # their stdin, ours; our stdout, theirs
            try:
                ends += os.pipe()
                ends += os.pipe()
                found = self._ask(request.encode(), [ends[0], ends[3], 2, *filenos])
                ours = [] if found is None else [ends.pop(1), ends.pop(1)]
            finally:
                for each in ends:
                    os.close(each)
            if found is None:
                self._end()
                return None
            return ForkedProcess(*found, os.fdopen(ours[0], "wb"), os.fdopen(ours[1], "rb"))

    def close(self) -> None:
        """End it; ranks that it has forked go on. Idempotent."""
        with self._lock:
            self._end()

    def _wait_ready(self, timeout_s: float) -> bool:
        if not self._is_ready:
            self._is_ready = self._receive(timeout_s) is not None
        return self._is_ready and self._process.poll() is None

    def _ask(self, request: bytes, sent: list[int]) -> tuple[int, int] | None:
        """Return the number and the descriptor of a rank; None where there is no answer."""
        try:
            self._socket.settimeout(FORK_TIMEOUT_S)
            socket.send_fds(self._socket, [request], sent)
        except OSError:  # it is gone, or does not read
            return None
        found = self._receive(FORK_TIMEOUT_S)
        return None if found is None or len(found[1]) != 1 else (int(found[0]), found[1][0])

    def _receive(self, timeout_s: float) -> tuple[bytes, list[int]] | None:
        """Return a packet and its descriptors; None where none comes in time, or ever."""
        try:
            self._socket.settimeout(timeout_s)
            text, received, _, _ = socket.recv_fds(
                self._socket, _MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return None
        return (text, received) if text else None

    def _end(self) -> None:
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)


class SharedServer:
    """The server of all groups of this process whose ranks have one command: there as long as
    anything holds it."""

    _lock = threading.Lock()
    _servers: ClassVar[dict[tuple[str, ...], ForkServer]] = {}
    _num_holders: ClassVar[Counter[tuple[str, ...]]] = Counter()

    def __init__(self, command: Sequence[str]) -> None:
        """Hold it, and see that it is there. `command` is that of a rank."""
        self._command, self._is_held = tuple(command), True
        with self._lock:
            self._num_holders[self._command] += 1
        self.prepare()

    @classmethod
    def fork(cls, command: Sequence[str], filenos: Sequence[int]) -> ForkedProcess | None:
        """See `ForkServer.fork`; None also where there is no server."""
        with cls._lock:
            server = cls._servers.get(tuple(command))
        return None if server is None else server.fork(filenos)

    def prepare(self) -> None:
        """Start it, unless there is one that could fork a rank as it would be started now."""
        with self._lock:
            server = self._servers.get(self._command)
            if server is None or not server.is_usable:
                self._drop()
                with contextlib.suppress(OSError):  # ranks are started without one
                    self._servers[self._command] = ForkServer((*self._command, FORK))

    def wait_ready(self, timeout_s: float) -> bool:
        """See `ForkServer.wait_ready`."""
        with self._lock:
            server = self._servers.get(self._command)
        return server is not None and server.wait_ready(timeout_s)

    def release(self) -> None:
        """Hold it no more; ends it where nothing else does. Idempotent."""
        with self._lock:
            if self._is_held:
                self._is_held = False
                self._num_holders[self._command] -= 1
                if not self._num_holders[self._command]:
                    self._drop()

    def _drop(self) -> None:
        server = self._servers.pop(self._command, None)
        if server is not None:
            server.close()


def serve_forks(fileno: int, load: Callable[[], object]) -> dict[str, str] | None:
    """Import by `load`, and fork ranks until the other end is closed. Returns twice for each: None
    in this process, when it is over, and in a rank its environment, with its streams in place."""
    _name_process("quire-forks")
    _load_in_background(load)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    with socket.socket(fileno=fileno) as requests, contextlib.suppress(BrokenPipeError):
        requests.send(b"ready")
        while True:
            text, received, _, _ = socket.recv_fds(requests, _MAX_PACKET, 253)
            if not text:
                return None
            request = json.loads(text)
            # A rank is not forgotten before there is a descriptor of it.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            pid = os.fork()
            if pid == 0:
                requests.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                os.setpgid(0, 0)
                _name_process("quire-rank")
                _place(received, [0, 1, 2, *request["filenos"]])
                return dict(request["environment"])
            process = os.pidfd_open(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            socket.send_fds(requests, [str(pid).encode()], [process])
            for each in (process, *received):
                os.close(each)
    return None


def _name_process(name: str) -> None:
    """Show what a process is: its command would not tell a server from its ranks."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _load_in_background(load: Callable[[], object]) -> None:
    """Import in a thread of low priority, which the system has for each thread: a process could not
    go back to its own. Then keep what there is out of collections of garbage, so that ranks do not
    write to pages that they share."""

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        load()

    thread = threading.Thread(target=run, name="quire-imports")
    thread.start()
    thread.join()
    gc.collect()
    gc.freeze()
    # OpenBLAS, which has threads from its import on, deals with forks itself.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)


def _place(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Give descriptors the numbers that are wanted, among which may be each other's."""
    import fcntl

    above = max((*wanted, *received)) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in received]
    for each in received:
        os.close(each)
    for source, target in zip(moved, wanted, strict=True):
        os.dup2(source, target)
        os.close(source)


def _reap() -> None:
    """Let the system forget ranks that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _of_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
