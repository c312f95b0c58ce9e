"""`quire serve` as a process of its own: what runs where, what it holds,
and how it is told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

MODEL = "quire-storyteller"
OPTIONS = (MODEL, "--num-threads", "1", "--kv-cache-memory", "48MiB", "--port", "0")
DEADLINE_S = 60.0


@dataclass(slots=True)
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    """With a key, where it wants one."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engine_pid(self) -> int:
        """The engine's process, beside which one may compile grammars on trial."""
        [engine] = [
            child
            for child in children(self.process.pid)
            if b"quire.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        ]
        return engine

    def client(self, timeout_s: float = 60.0) -> httpx.Client:
        """A client with a key."""
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=timeout_s)

    def get(self, path: str) -> httpx.Response:
        """One answer."""
        return httpx.get(f"{self.url}{path}", headers=self.headers, timeout=60)

    def progress(self) -> dict[str, float]:
        """The engine's numbers."""
        numbers: dict[str, float] = self.get("/healthz/progress").json()
        return numbers

    def await_ready(self) -> None:
        """Wait until the model is there."""

        def is_ready() -> bool:
            assert self.process.poll() is None, "the server has ended"
            return self.get("/readyz").status_code == 200

        until(is_ready, DEADLINE_S)

    def await_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing is computed and no block is held."""

        def is_idle() -> bool:
            numbers = self.progress()
            return not any(
                numbers[name] for name in ("num_requests", "num_running", "num_waiting", "kv_usage")
            )

        until(is_idle, timeout_s)


@contextmanager
def serving(
    *options: str,
    keys: str | None = None,
    few_files: int | None = None,
    model: str = MODEL,
    log: Path | None = None,
) -> Iterator[Served]:
    """A server of the shipped model, or another one, with further options. Killed at the end, if it
    still runs.

    `few_files`: how many it may open. Its `stderr` can be read, or, where much is written to it,
    goes to a file, `log`.
    """
    command = [sys.executable, "-m", "quire", "serve", model, *OPTIONS[1:], *options]
    if few_files is not None:
        command = ["sh", "-c", f'ulimit -n {few_files}; exec "$@"', "sh", *command]
    with _running(command, {"QUIRE_API_KEYS": keys} if keys else {}, log) as served:
        key = keys.split(",")[0].partition("=")[2] if keys else None
        served.headers = {"x-api-key": key} if key else {}
        yield served


@contextmanager
def routing(*options: str, log: Path | None = None) -> Iterator[Served]:
    """A router with these options."""
    command = [sys.executable, "-m", "quire", "route", "--port", "0", *options]
    with _running(command, {}, log) as served:
        yield served


@contextmanager
def _running(
    command: list[str], environment: Mapping[str, str], log: Path | None
) -> Iterator[Served]:
    """A program from when it has said where it listens."""
    with ExitStack() as stack:
        stderr = subprocess.PIPE if log is None else stack.enter_context(log.open("wb"))
        process = stack.enter_context(
            subprocess.Popen(command, stderr=stderr, text=True, env={**os.environ, **environment})
        )
        stack.callback(process.kill)
        line = ""
        while "listening on" not in line:
            if log is None:
                assert process.stderr is not None
                line = process.stderr.readline()
                assert line, "the program has ended"
            else:
                time.sleep(0.01)
                line = next((each for each in _lines(log) if "listening on" in each), "")
                assert line or process.poll() is None, log.read_text()
        assert "listening on http://" in line, line
        yield Served(process, line.split()[3].rstrip(","))


def _lines(log: Path) -> list[str]:
    """Those that are complete."""
    return log.read_text().split("\n")[:-1]


def until(is_so: object, timeout_s: float = 60.0) -> float:
    """Wait until `is_so()`; how long that took, in seconds. Fails after `timeout_s`."""
    assert callable(is_so)
    began_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - began_s < timeout_s, "did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - began_s


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no mere entry in the table."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends meanwhile
        return False


def resident_bytes(pid: int, what: str = "VmRSS") -> int:
    """What a process holds in memory; `VmHWM` is the most that it ever held."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) << 10


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken, in seconds:
    what other work on the machine does not lengthen."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def listening(pid: int) -> list[str]:
    """TCP addresses on which a process listens."""
    fds = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            fds.append(os.readlink(fd))
    mine = {name[8:-1] for name in fds if name.startswith("socket:[")}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and line[9] in mine]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that does not run for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)
