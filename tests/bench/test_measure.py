"""A measured run: all tokens timed, counters fresh, overhead and profile consistent."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from timing import timed

from quire.bench.limits import LimitSampler, Pace, Work
from quire.bench.measure import RunClock, measure, medians
from quire.bench.profiling import FORWARD_KERNELS, PHASES, StepProfile
from quire.bench.workload import parallel_workload, prefix_workload, random_workload
from quire.config.engine import EngineConfig
from quire.engine.assembly.builder import build_engine
from quire.engine.loop.engine import Engine
from quire.engine.loop.launchers import DirectLauncher
from quire.engine.loop.step_loop import OverlappedLoop
from quire.errors import EngineError


@pytest.fixture(scope="module")
def engine(tiny: str) -> Iterator[Engine]:
    config = EngineConfig(
        model=tiny, skip_tokenizer_init=True, num_threads=1, kv_cache_memory="4MiB"
    )
    engine = build_engine(config)
    yield engine
    engine.close()


def test_every_token_is_timed(engine: Engine) -> None:
    workload = random_workload(5, (4, 20), (2, 9))
    requests = workload.requests(0, 512)
    run = measure(engine, requests)
    assert [len(each.token_s) for each in run.requests] == [each.num_output for each in requests]
    assert run.num_output == sum(each.num_output for each in requests)
    assert all(
        each.token_s == sorted(each.token_s) and each.finished_s == each.token_s[-1]
        for each in run.requests
    )
    assert 0 < run.execute_s < run.wall_s
    # Each token is computed once, but for the last of each sequence.
    assert sum(cost.num_tokens for cost in run.costs) == run.num_prompt + run.num_output - len(
        requests
    )
    again = measure(engine, workload.requests(1, 512))
    assert (
        again.stats.num_steps == run.stats.num_steps
        and again.stats.num_generated_tokens == run.num_output
    )


def test_shared_prefixes_are_hits(engine: Engine) -> None:
    run = measure(engine, prefix_workload(4, 64, 8, 3).requests(0, 512))
    assert sum(each.num_prefix_hits for each in run.requests) == 3 * 64


def test_parallel_sequences_are_counted(engine: Engine) -> None:
    run = measure(engine, parallel_workload(2, 12, 3, 4, name="parallel").requests(0, 512))
    assert run.num_output == 24 and all(len(each.token_s) == 4 for each in run.requests)


def test_a_run_that_ends_early_is_no_measurement(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.bench.measure._note", lambda *_: None)
    with pytest.raises(EngineError, match="that is no measurement"):
        measure(engine, random_workload(1, (4, 4), (2, 2)).requests(0, 512))


@timed
def test_profile_adds_up_to_the_steps(engine: Engine) -> None:
    profile = StepProfile(engine)
    run = measure(engine, random_workload(3, (4, 8), (3, 5)).requests(7, 512))
    seconds = profile.seconds()
    assert tuple(seconds) == PHASES and all(value >= 0 for value in seconds.values())
    assert 0.5 * run.wall_s < sum(seconds.values()) <= run.wall_s
    assert sum(seconds[phase] for phase in (*FORWARD_KERNELS, "forward")) > seconds["schedule"]
    profile.reset()
    assert sum(profile.seconds().values()) == 0


def test_a_clock_stands_still_aside() -> None:
    now_s = [10.0]

    def wait(seconds: float) -> None:
        now_s[0] += seconds

    clock = RunClock(lambda: now_s[0])
    wait(2)
    clock.aside(lambda: wait(5))
    wait(1)
    assert clock.now() == 3


def test_time_aside_that_ends_in_an_error_does_not_count_either() -> None:
    now_s = [0.0]

    def fail() -> None:
        now_s[0] += 4
        raise ValueError

    clock = RunClock(lambda: now_s[0])
    with pytest.raises(ValueError):
        clock.aside(fail)
    assert clock.now() == 0


def slow_sampler(every_s: float) -> LimitSampler:
    """Samples that take far longer than a step of the tiny model."""
    work = Work("read", "r", 1, lambda: lambda: time.sleep(0.05))
    sampler = LimitSampler([work], Pace(every_s, 1, keeps_operands=True))
    sampler.sample()
    return sampler


def test_limits_are_sampled_between_steps_and_outside_of_the_time(engine: Engine) -> None:
    requests = random_workload(1, (4, 4), (8, 8)).requests(3, 512)
    num_steps = measure(engine, requests).stats.num_steps
    started = time.perf_counter()
    run = measure(engine, requests, slow_sampler(every_s=0.0))
    taken_s = time.perf_counter() - started
    assert len(run.samples) == num_steps + 2  # after each step, and around the run
    aside_s = 0.05 * len(run.samples)
    assert 0 < run.execute_s < run.wall_s < taken_s - aside_s
    assert run.requests[0].token_s[-1] <= run.wall_s and run.requests[0].token_s == sorted(
        run.requests[0].token_s
    )


def test_steps_that_overlap_are_not_interrupted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = OverlappedLoop(DirectLauncher())
    monkeypatch.setattr(engine, "loop", loop)
    run = measure(
        engine, random_workload(1, (4, 4), (4, 4)).requests(4, 512), slow_sampler(every_s=0.0)
    )
    loop.close()
    assert len(run.samples) == 2


def test_medians_reach_into_groups() -> None:
    runs = [{"a": value, "b": {"c": 10 * value}, "d": None} for value in (3, 1, 2)]
    assert medians(runs) == {"a": 2, "b": {"c": 20}, "d": None}
