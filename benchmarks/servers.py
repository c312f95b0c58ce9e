"""Servers as processes, for the harnesses that load them: Quire or vLLM, started, awaited, watched
and ended.

A server is known by its URL and by the process that answers HTTP, whose processor time and memory
can be told from those of the engine's processes below it. Owns no clients.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench import record as records
from quire.engine.plan.machine import Machine

READY_S = 900.0
"""vLLM compiles for minutes on a slow machine."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start."""

    engine: str
    """"quire" or "vllm"."""
    model: str
    options: Sequence[str] = ()
    """Of its command line."""
    program: str = sys.executable
    """The Python that has it."""
    preload: str = ""
    num_threads: int = 2

    def command(self, port: int) -> list[str]:
        """Return the whole command line."""
        if self.engine == "quire":
            threads = ["--num-threads", str(self.num_threads)]
            return [
                self.program,
                "-m",
                "quire",
                "serve",
                self.model,
                "--port",
                str(port),
                *threads,
                *self.options,
            ]
        quiet = ["--disable-uvicorn-access-log", "--served-model-name", "m", "--host", "127.0.0.1"]
        return [
            self.program, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model,
            "--port", str(port), *quiet, *self.options,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the environment with the settings that vLLM recommends on CPUs."""
        env = dict(
            os.environ,
            OMP_NUM_THREADS=str(self.num_threads),
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
        )
        if self.preload:
            env["LD_PRELOAD"] = self.preload
        if self.engine == "vllm":
            env |= {
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.num_threads - 1}",
                "VLLM_LOGGING_LEVEL": "WARNING",
            }
            env |= {"VLLM_NO_USAGE_STATS": "1"}
        return env


@dataclass(slots=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    ready_s: float
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """The process that answers HTTP."""
        return self.process.pid

    def api_cpu_s(self) -> float:
        """Return processor time of that process alone, all its threads."""
        return cpu_s(self.pid)

    def metrics(self) -> str:
        """Prometheus' text."""
        return get(f"{self.url}/metrics")


@contextmanager
def running(launch: Launch) -> Iterator[Server]:
    """Start, wait until it is ready, and end it however the block is left, by SIGTERM too.
    RuntimeError with its last words if it fails."""
    _leave_blocks_when_terminated()
    port, began_s = free_port(), time.monotonic()
    with tempfile.TemporaryFile() as log:
        command = launch.command(port)
        process = subprocess.Popen(
            command, env=launch.environment(), stdout=log, stderr=log, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            ready = f"{url}/readyz" if launch.engine == "quire" else f"{url}/health"
            while not _answers(ready):
                if process.poll() is not None or time.monotonic() - began_s > READY_S:
                    log.seek(0)
                    text = log.read()[-3000:].decode(errors="replace")
                    raise RuntimeError(
                        f"{launch.engine} did not become ready (exit code "
                        f"{process.poll()}):\n{text}"
                    )
                time.sleep(0.1)
            yield Server(url, process, time.monotonic() - began_s)
        finally:
            _end(process)


def _leave_blocks_when_terminated() -> None:
    """Have SIGTERM (`timeout`, `kill`) end this program as an interrupt does: servers have sessions
    of their own, and would go on in memory that the next measurement lacks."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process by SIGTERM, then by force; its session goes with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    """Return a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def get(url: str) -> str:
    """Return the body of a GET."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body.decode()


def _answers(url: str) -> bool:
    try:
        get(url)
    except (OSError, urllib.error.URLError):
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Return a process and all below it."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                todo += map(int, children.read_text().split())
            except OSError:
                continue
    return found


def cpu_s(pid: int) -> float:
    """Return processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def rss_bytes(pid: int) -> int:
    """Return memory that a process holds now, without pages of files (which are the kernel's to
    take)."""
    found = re.search(
        r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return int(found[1]) << 10 if found is not None else 0


def num_fds(pid: int) -> int:
    """Open files."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_threads(pid: int) -> int:
    """Threads."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def histogram_percentile(text: str, name: str, share: float) -> float:
    """Return a percentile of a Prometheus histogram, between the bounds of its bucket;
    infinite beyond the last."""
    rows = re.findall(
        rf'^{re.escape(name)}_bucket{{[^}}]*le="([^"]+)"[^}}]*}} ([0-9.e+]+)$', text, re.MULTILINE
    )
    bounds = [(float(bound), float(count)) for bound, count in rows]
    wanted = share * bounds[-1][1]
    below, num_below = 0.0, 0.0
    for bound, count in bounds:
        if count >= wanted:
            return (
                bound
                if bound == float("inf") or count == num_below
                else (below + (bound - below) * (wanted - num_below) / (count - num_below))
            )
        below, num_below = bound, count
    return float("inf")


def metric(text: str, name: str) -> float:
    """Return the sum of a metric's values over its labels."""
    rows = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    return sum(map(float, rows))


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """--engine, --model and what belongs to them."""
    parser.add_argument(
        "--engine", choices=("quire", "vllm"), default="quire", help="(default: quire)"
    )
    parser.add_argument("--model", default="quire-storyteller", help="(default: quire-storyteller)")
    parser.add_argument(
        "--program",
        default=sys.executable,
        help="the Python that has the engine (default: this one)",
    )
    parser.add_argument("--preload", default="", help="LD_PRELOAD of the server")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="TEXT",
        help="of the server's command line (repeatable)",
    )


def launch_of(args: argparse.Namespace, *options: str) -> Launch:
    """Return the launch that the options describe; `options` come first."""
    return Launch(
        args.engine, args.model, (*options, *args.option), args.program, args.preload, args.threads
    )


def report(figures: dict[str, Any], lines: Sequence[str], path: Path | None) -> None:
    """Print a measurement, and write it to `path` with the machine and
    versions that it was made on."""
    print("\n".join(lines))
    figures |= {
        "machine": records.describe_machine(Machine.inspect()),
        "versions": records.describe_versions(),
    }
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
