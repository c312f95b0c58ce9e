"""Steps' costs: found where they are known, and good enough for a simulation of what an engine does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.bench.steps import MeasuredStep, fit, measure_steps
from quire.bench.trace_run import WaitingTimes, check_fits, run_trace, without_answers
from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.config.limits import SchedulerLimits
from quire.core.step_cost import StepWork, UnitCosts
from quire.engine.assembly.builder import build_engine
from quire.engine.loop.engine import Engine
from quire.errors import ConfigError
from quire.sim.step_times import StepTimes
from quire.sim.traces import Trace, TraceRequest

COSTS = UnitCosts(0.02, 0.01, 2e-3, 1e-4, 1e-6, 1e-8)
CURVE = ((1, 0.9), (32, 1.3), (128, 1.0))


def drawn_steps(count: int, noise: float) -> list[MeasuredStep]:
    chance, steps = random.Random(3), []
    for _ in range(count):
        rows, context = chance.choice((1, 4, 32)), chance.choice((32, 500, 4000))
        tokens = chance.choice((rows, 64, 512))
        has_head = chance.random() < 0.7
        work = StepWork(
            1, has_head, tokens, rows * has_head, rows * context, float(tokens * context)
        )
        seconds = StepTimes(COSTS, CURVE).seconds(work) * chance.uniform(1 - noise, 1 + noise)
        steps.append(MeasuredStep(work, seconds))
    return steps


def test_costs_are_found_among_noise_and_interruptions() -> None:
    steps = drawn_steps(300, noise=0.03)
    slowed = [each._replace(seconds=3 * each.seconds) for each in steps[::20]]
    found = StepTimes(*fit(steps + slowed))
    for work, seconds in drawn_steps(100, noise=0.0):
        assert found.seconds(work) == pytest.approx(seconds, rel=0.03)


def test_the_costs_of_short_steps_alone_are_no_part_of_the_curve() -> None:
    short = [each for each in drawn_steps(300, noise=0.03) if each.work.num_tokens < 128]
    costs, curve = fit(short)
    assert max(count for count, _ in curve) == 64 and curve[-1][1] == 1.0
    found = StepTimes(costs, curve)
    for work, seconds in short:
        assert found.seconds(work) == pytest.approx(seconds, rel=0.06)


def test_no_cost_is_below_nothing() -> None:
    steps = [MeasuredStep(StepWork(1, 0, n, 0, n, 0.0), 0.1 / n) for n in (1, 2, 4)]
    costs, _ = fit(steps)
    assert all(cost > 0.0 for cost in costs)


def test_between_two_points_the_curve_is_a_line_over_the_logarithms() -> None:
    times = StepTimes(COSTS, CURVE)
    assert [times.ratio(count) for count in (1, 32, 64, 128, 4096)] == [0.9, 1.3, 1.15, 1.0, 1.0]
    assert StepTimes(COSTS).ratio(7) == 1.0


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(
        model="quire-storyteller", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
        kv_cache_memory="1MiB", num_threads=1,
    )  # fmt: skip
    made = build_engine(config, is_streaming=True)
    yield made
    made.close()


def test_an_engines_steps_are_measured_and_a_trace_is_run(engine: Engine) -> None:
    told: list[str] = []
    found = measure_steps(engine, told.append)
    assert told == [f"steps of {name}" for name, _ in found.kinds]
    assert [name for name, _ in found.kinds] == [
        "a prompt of 16", "a prompt of 40", "32 of mixed lengths"
    ]  # fmt: skip
    assert len(found.lines()) == 1 + len(found.kinds)
    requests = (
        TraceRequest(5.0, 20, 4, (7, 8)),
        TraceRequest(5.01, 36, 1, (7, 8, 9), (10,)),
        TraceRequest(5.2, 16, 3, (7,)),
    )
    trace = without_answers(Trace(requests, 16))
    check_fits(trace, engine.plan.limits)
    real = run_trace(engine, trace, speed=2.0)
    assert len(real.first_token_s) == 3 and len(real.per_token_s) == 2
    assert min(*real.first_token_s, *real.per_token_s) > 0.0
    assert engine.scheduler.stats.num_prefix_hit_tokens > 0, "prompts that share no longer do"
    assert not engine.has_work


def test_what_the_engine_would_refuse_is_refused_by_number() -> None:
    trace = Trace((TraceRequest(0.0, 10, 10), TraceRequest(0.0, 60, 10)), 16)
    with pytest.raises(ConfigError, match="request 1 of the trace takes 70 tokens"):
        check_fits(trace, SchedulerLimits(100, 16, max_model_len=64))


def test_both_are_told_with_the_difference() -> None:
    real, simulated = WaitingTimes([1.0, 2.0], [0.1]), WaitingTimes([1.1, 1.9], [0.1])
    first, per_token = real.compared(simulated)
    assert "p95 2000.0 ms real, 1900.0 ms simulated (-5.0%)" in first
    assert "median 100.0 ms real, 100.0 ms simulated (+0.0%)" in per_token


def test_what_is_written_is_what_the_simulator_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, costs = tmp_path / "trace.csv", tmp_path / "costs.json"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,4\n0.05,30,2\n")
    options = ["--max-model-len", "64", "--max-num-seqs", "4", "--kv-cache-memory", "1MiB"]
    command = ["bench", "steps", "quire-storyteller", *options, "--output", str(costs)]
    assert main([*command, "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 complete" in shown and "real" in shown and "simulated" in shown
    assert set(json.loads(costs.read_text())) == {
        "estimate", "ratios", "num_observed", "curve"
    }  # fmt: skip
    fleet = ["simulate", "--trace", str(trace), "--fleet", "2", "--target-step-ms", "200"]
    assert main([*fleet, "--step-costs", str(costs)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "3"], "say which: --trace FILE"),
        (["--speed", "0"], "say which: --trace FILE"),
        (["--trace", "t.csv", "--speed", "0"], "--speed=0.0 must be a number above 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "steps", "quire-storyteller", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_makes_no_text_is_refused_before_it_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "steps", "quire-embedder"]) != 0
    shown = capsys.readouterr().err
    assert "makes vectors" in shown and "loading" not in shown
