"""The protocol between `benchmarks.compare` and an engine: lines of JSON through a child process's
standard streams.

A peer's module (`benchmarks/peers/NAME.py`) hands `serve` a function that opens its engine; it runs
as `python -m benchmarks.peers.NAME` in a Python that has the peer installed, which need not be
Quire's. The process stays, idle, between the commands, so that engines can take turns without
loading again. Owns the clock, the processor time and the memory of a run, for all engines alike.
Never imports an engine or torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quire.bench.workload import BenchRequest, random_workload

_WARM_UP = random_workload(8, (40, 48), (8, 8), name="warm-up")


class Options(NamedTuple):
    """What an engine is opened with."""

    model: Path
    """A folder or file in the engine's own format."""
    form: str
    """Data type or quantization, by the engine's name for it:
    the part of the variant's name after the colon."""
    num_threads: int
    program: str
    """The program given with `--peer`, where the engine is one (llama-server)."""
    extra: dict[str, str]
    """What else the variant's name says: "generate:float32:batch=16"."""


class PeerEngine(Protocol):
    """An engine with a model loaded."""

    version: str
    settings: dict[str, Any]
    """What is needed to set it up alike."""

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """Run all requests to their full lengths; the number of tokens of every sequence."""
        ...

    def stream(self, request: BenchRequest) -> list[float]:
        """Run one request; `time.perf_counter()` at each token."""
        ...

    def close(self) -> None:
        """End threads and processes."""
        ...


def serve(open_engine: Callable[[Options], PeerEngine]) -> None:
    """Open the engine, say so, and carry out one command a line until the input ends."""
    options, vocab_size = _options()
    # so that `close` ends what the engine has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Libraries print. What they print goes to the errors; the answers go where standard output was.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()
    engine = open_engine(options)
    try:
        requests = _WARM_UP.requests(0, vocab_size)
        engine.stream(requests[0])
        ready_s = time.perf_counter() - started
        engine.run(requests)
        print(
            json.dumps(
                {"ready_s": ready_s, "version": engine.version, "settings": engine.settings}
            ),
            file=answers,
        )
        for line in sys.stdin:
            requests = [BenchRequest(*fields) for fields in json.loads(line)]
            print(json.dumps(_measured(engine, requests)), file=answers)
    finally:
        engine.close()


def _options() -> tuple[Options, int]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--form", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--program", default="")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--extra", action="append", default=[], help="KEY=VALUE")
    args = parser.parse_args()
    extra = dict(each.split("=", 1) for each in args.extra)
    return Options(args.model, args.form, args.threads, args.program, extra), args.vocab_size


def _measured(engine: PeerEngine, requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """Measure one run: when it began, wall time, processor time of all processes,
    and for a single sequence the time of each token."""
    is_single = len(requests) == 1 and requests[0].num_sequences == 1
    started, cpu_started = (
        time.perf_counter(),
        sum(_cpu_s(pid) for pid in process_tree(os.getpid())),
    )
    token_s: list[float] | None = None
    if is_single:
        token_s = [each - started for each in engine.stream(requests[0])]
        counts = [len(token_s)]
    else:
        counts = engine.run(requests)
    wall_s = time.perf_counter() - started
    wanted = [each.num_output for each in requests for _ in range(each.num_sequences)]
    if sorted(counts) != sorted(wanted):
        raise RuntimeError(
            f"{sum(counts)} tokens in {len(counts)} sequences came, not {sum(wanted)} in "
            f"{len(wanted)}"
        )
    pids = list(process_tree(os.getpid()))
    cpu_s = sum(_cpu_s(pid) for pid in pids) - cpu_started
    peak = sum(_peak_bytes(pid) for pid in pids)
    return {
        "started_s": started,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "token_s": token_s,
        "peak_rss_bytes": peak,
    }


def process_tree(root: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield root
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the thread has ended meanwhile
            continue
        for child in children:
            yield from process_tree(int(child))


def _cpu_s(pid: int) -> float:
    """User and system time so far; 0 for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> int:
    """Return the largest resident set so far."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
