"""A run beside which limits are sampled: when,
and that the time of standing still is not the engine's."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stopped import state_of

from benchmarks import referee
from benchmarks.processes import JsonProcess, standing_still
from benchmarks.referee import Referee, RefereeError, overlap_s, watched_run
from benchmarks.variants import PeerProcess
from quire.bench.limits import LimitSample, typical
from quire.bench.workload import parallel_workload, random_workload

ENGINE = """\
import json, os, sys, time
print("{}", flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.001)
    wall_s = time.perf_counter() - started
    print(json.dumps({"started_s": started, "wall_s": wall_s, "cpu_s": wall_s}), flush=True)
"""
"""An engine that works until a file is there, and says how long that was as `cpu_s`, too."""


class Judge:
    """A referee that gives another speed each time,
    and has the engine end after one of the samples."""

    def __init__(self, file: Path) -> None:
        self.samples: list[LimitSample] = []
        self.file = file
        self.last = 0

    def sample(self, stopped: Sequence[int]) -> LimitSample:
        assert [state_of(pid) for pid in stopped] == ["T"]
        rate = 10.0 ** len(self.samples)
        self.samples.append(LimitSample(rate, {"float32": {"f": 2 * rate}}))
        if len(self.samples) == self.last:
            self.file.touch()
        return self.samples[-1]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(referee, "_EVERY_S", 0.05)
    return Judge(tmp_path / "end")


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    process = JsonProcess(
        "engine", [sys.executable, "-ISc", ENGINE, str(tmp_path / "end")], os.environ
    )
    process.answer(60)
    yield cast(PeerProcess, process)
    process.close()


def test_a_run_is_sampled_around_and_during_and_its_pauses_are_taken_off(
    engine: PeerProcess, judge: Any
) -> None:
    judge.last = 3
    result = watched_run(engine, random_workload(2, (4, 4), (2, 2)).requests(0, 128), judge)
    assert len(judge.samples) >= 4  # one on either side, and two meanwhile
    assert result["paused_s"] > 0 and result["wall_s"] == pytest.approx(
        result["cpu_s"] - result["paused_s"]
    )
    assert result["limits"] == typical(judge.samples)._asdict() and "started_s" not in result


def test_a_single_sequence_is_not_interrupted(
    engine: PeerProcess, judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge.last = 5
    monkeypatch.setattr(referee, "stolen_s", itertools.count(3.0, 2.5).__next__)  # at each look
    result = watched_run(engine, random_workload(1, (4, 4), (2, 2)).requests(0, 128), judge)
    assert (
        len(judge.samples) == 10 and result["paused_s"] == 0 and result["wall_s"] == result["cpu_s"]
    )
    assert result["stolen_s"] == 2.5
    judge.file.unlink()
    judge.last = 12
    watched_run(engine, parallel_workload(1, 4, 2, 2, name="p").requests(0, 128), judge)
    assert len(judge.samples) >= 13  # two sequences of one prompt are interrupted again


@pytest.mark.parametrize(
    ("pauses", "seconds"),
    [
        ([], 0),
        ([(1, 2), (3, 4.5)], 2.5),
        ([(-1, 0.25), (9.5, 11)], 0.75),
        ([(-2, -1), (10, 12)], 0),
        ([(-1, 11)], 10),
    ],
)
def test_only_what_lies_within_a_run_is_taken_off(
    pauses: list[tuple[float, float]], seconds: float
) -> None:
    assert overlap_s(pauses, (0, 10)) == seconds


def test_a_referee_that_fails_is_not_the_engines_fault(engine: PeerProcess) -> None:
    broken = object.__new__(Referee)
    broken._process = JsonProcess(
        "the referee", [sys.executable, "-ISc", "import sys; sys.exit('no room')"], os.environ
    )
    with pytest.raises(RefereeError, match=r"(?s)the referee failed.*no room"):
        watched_run(engine, random_workload(2, (4, 4), (2, 2)).requests(0, 128), broken)
    assert state_of(engine.pid) not in "TXZ"


def test_a_referee_whose_comparison_was_killed_lets_the_engine_go_on(
    engine: PeerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def sample() -> LimitSample:
        seen.append(state_of(engine.pid))
        return LimitSample(1.0, {})

    monkeypatch.setattr(referee, "limit_sampler", lambda: SimpleNamespace(sample=sample))
    monkeypatch.setattr(sys, "argv", ["referee", "1"])
    before = signal.getsignal(signal.SIGINT)
    with standing_still(engine.pid) as pids:
        monkeypatch.setattr(sys, "stdin", [json.dumps(pids)])
        referee.main()
        assert state_of(engine.pid) not in "TXZ"
    signal.signal(signal.SIGINT, before)
    assert seen == [seen[0], "T"] and capsys.readouterr().out.count('"read_bytes_per_s": 1.0') == 2
