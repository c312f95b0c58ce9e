"""The referee of a comparison: a process of its own that samples the machine's limits while the
engine that runs stands still.

Owns when samples are taken (right before, right after, and every few seconds of a run), and that
the time of standing still is not the engine's. A run of a single sequence, which tells the time of
each token, is not interrupted; it has several samples on either side instead. What a sample is,
`quire.bench.limits` says.

`python -m benchmarks.referee THREADS` is the process. Each line that it reads lists the processes
that stand still for the sample which it answers with. When its input ends, it lets those go on: a
comparison that was killed leaves no process stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import JsonProcess, let_go_on, standing_still
from benchmarks.variants import ANSWER_S, PeerProcess
from quire.bench.limits import LimitSample, limit_sampler, typical
from quire.bench.workload import BenchRequest
from quire.errors import QuireError

_EVERY_S = 3.0
_NUM_AROUND_SINGLE = 5
"""Samples on either side of a run that is not interrupted."""
_START_S, _SAMPLE_S = 300.0, 60.0
"""A referee that is silent for so long has failed."""

Interval = tuple[float, float]
"""Of `time.perf_counter()`, which on Linux all processes read alike."""


class RefereeError(QuireError):
    """The limits cannot be sampled."""


class Referee:
    """The process, as the comparison sees it; ready and idle between samples."""

    def __init__(self, num_threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.referee", str(num_threads)]
        self._process = JsonProcess(
            "the referee", command, dict(os.environ, OMP_NUM_THREADS=str(num_threads))
        )
        self._answer(_START_S)

    def sample(self, stopped: Sequence[int]) -> LimitSample:
        """Take one sample, while these processes stand still."""
        try:
            self._process.send(stopped)
        except RuntimeError as error:
            raise RefereeError(str(error)) from None
        return LimitSample(**self._answer(_SAMPLE_S))

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            return self._process.answer(timeout_s)
        except RuntimeError as error:
            raise RefereeError(str(error)) from None


def watched_run(
    process: PeerProcess, requests: Sequence[BenchRequest], referee: Referee
) -> dict[str, Any]:
    """Return a run's result, its `wall_s` without the time in which the engine was stopped;
    with `paused_s`, `limits`, `stolen_s`."""
    is_single = len(requests) == 1 and requests[0].num_sequences == 1
    num_around = _NUM_AROUND_SINGLE if is_single else 1
    samples: list[LimitSample] = []
    pauses: list[Interval] = []

    def sample() -> None:
        with standing_still(process.pid) as pids:
            since_s = time.perf_counter()
            samples.append(referee.sample(pids))
            pauses.append((since_s, time.perf_counter()))

    for _ in range(num_around):
        sample()
    stolen_before_s = stolen_s()
    process.send(requests)
    deadline = time.monotonic() + ANSWER_S
    while not is_single and time.monotonic() < deadline and not process.has_answer(_EVERY_S):
        sample()
    result = process.answer(max(0.0, deadline - time.monotonic()))
    taken_s = stolen_s() - stolen_before_s
    started_s = result.pop("started_s")
    paused_s = overlap_s(pauses, (started_s, started_s + result["wall_s"]))
    for _ in range(num_around):
        sample()
    wall_s, limits = result["wall_s"] - paused_s, typical(samples)._asdict()
    return {**result, "wall_s": wall_s, "paused_s": paused_s, "limits": limits, "stolen_s": taken_s}


def overlap_s(pauses: Sequence[Interval], run: Interval) -> float:
    """Return how much of a run lies in the pauses: one may begin when the run has just ended
    and its result is on the way."""
    return sum(max(0.0, min(end, run[1]) - max(start, run[0])) for start, end in pauses)


def stolen_s() -> float:
    """Return processor time that the host of this virtual machine has taken away since its start,
    while a process here wanted it."""
    _, *fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[7]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Answer until the input ends."""
    import torch

    from quire.kernels import cpu

    # a terminal sends it to all processes; the comparison decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    num_threads = int(sys.argv[1])
    torch.set_num_threads(num_threads)
    if cpu.IMPORT_ERROR is None:
        cpu.set_num_threads(num_threads)
    sampler = limit_sampler()
    print(json.dumps(sampler.sample()._asdict()), flush=True)  # the first one ranks the products
    stopped: list[int] = []
    try:
        for line in sys.stdin:
            stopped = json.loads(line)
            print(json.dumps(sampler.sample()._asdict()), flush=True)
    finally:
        let_go_on(stopped)


if __name__ == "__main__":
    main()
