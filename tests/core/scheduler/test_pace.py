"""Steps bounded by time: running streams go on beside long prompts,
short prompts beside long ones, and no prompt starves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.core.plan import ONE_SAMPLE, RowWork, StepPlan
from quire.core.scheduler.pace import StepPace
from quire.core.step_cost import StepCostModel, StepWork, UnitCosts, work_of

# 1 ms a step, 1 ms a token; what else there is costs next to nothing.
_COSTS = UnitCosts(0.001, 1e-9, 0.001, 1e-9, 1e-12, 1e-12)


def _pace(target_s: float, costs: UnitCosts = _COSTS) -> StepPace:
    return StepPace(StepCostModel(costs), target_s, quantum=4)


def _tokens(plan: StepPlan, row: int) -> int:
    return sum(work.num_tokens for work in plan.work if work.row == row)


def test_a_long_prompt_takes_what_the_target_leaves_beside_a_stream(
    harness: Callable[..., Any],
) -> None:
    h = harness(max_num_batched_tokens=128, max_model_len=256, num_blocks=128, pace=_pace(0.051))
    stream = h.add("stream", 8, max_tokens=60)
    h.step()
    long = h.add("long", 200)
    plans = [h.step() for _ in range(4)]
    # There are 51 ms for all: 1 for the step, 1 for the stream, and 48 tokens of the prompt, a
    # multiple of 4.
    assert [plan.num_tokens - 1 for plan in plans] == [48, 48, 48, 48]
    assert all(h.scheduler.pace.model.seconds(work_of(plan.work)) <= 0.051 for plan in plans)
    h.run()
    h.check(stream)
    h.check(long)


def test_without_running_streams_a_step_may_take_two_targets(harness: Callable[..., Any]) -> None:
    h = harness(max_num_batched_tokens=128, pace=_pace(0.030))
    h.add("long", 100)
    assert h.step().num_tokens == 56, "60 ms, of which the step itself takes 1"


def test_a_second_prompt_that_queues_makes_steps_longer(harness: Callable[..., Any]) -> None:
    h = harness(max_num_batched_tokens=128, max_model_len=256, num_blocks=128, pace=_pace(0.050))
    h.add("stream", 8, max_tokens=60)
    h.step()
    h.add("long", 200)
    h.add("longer", 220)
    assert h.step().num_tokens - 1 == 96, "two targets, in whole fours"
    h.run()


def test_queued_prompts_get_the_time_of_one_up_to_two_targets() -> None:
    pace, decodes = _pace(0.050), [RowWork(0, 5, 1, ONE_SAMPLE)]
    assert pace.prompt_s(decodes, 0) == pytest.approx(0.048)
    assert pace.prompt_s(decodes, 10) == pytest.approx(0.048)
    assert pace.prompt_s(decodes, 60) == pytest.approx(0.060)
    assert pace.prompt_s(decodes, 1000) == pytest.approx(0.100)
    many = [RowWork(row, 5, 1, ONE_SAMPLE) for row in range(40)]
    assert pace.prompt_s(many, 10) == pytest.approx(2 * 0.041, rel=1e-4)


def test_decodes_that_take_the_whole_target_leave_prompts_a_quarter() -> None:
    decodes = [RowWork(row, 5, 1, ONE_SAMPLE) for row in range(200)]
    assert _pace(0.200).prompt_s(decodes, 0) == pytest.approx(0.050)


def test_steps_are_not_so_short_that_they_only_read_weights() -> None:
    costs, decodes = _COSTS._replace(step_s=0.002), [RowWork(0, 5, 1, ONE_SAMPLE)]
    assert _pace(0.020, costs).prompt_s(decodes, 0) == pytest.approx(0.040), "two targets at most"
    assert _pace(0.040, costs).prompt_s(decodes, 0) == pytest.approx(0.060), "thirty times 2 ms"
    costs = costs._replace(context_s=1e-6)
    assert _pace(0.040, costs).prompt_s(decodes, 0, context_len=300) == pytest.approx(0.069), (
        "and of 0.3 ms of keys and values"
    )


def test_a_short_prompt_is_not_divided_between_two_steps(harness: Callable[..., Any]) -> None:
    h = harness(
        max_num_batched_tokens=64, max_num_partial_prefills=2, num_blocks=128, pace=_pace(0.025)
    )
    for name in "abc":
        h.add(name, 20)
    lengths = [[work.num_tokens for work in h.step().work] for _ in range(2)]
    assert lengths == [[20, 20], [1, 1, 20]], "50 ms hold two of them, and a part of the third"
    h.run()


def test_every_step_brings_a_prompt_forward_however_slow_the_machine(
    harness: Callable[..., Any],
) -> None:
    h = harness(pace=_pace(0.001, UnitCosts(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)))
    request = h.add("prompt", 30)
    assert h.step().num_tokens == 4
    h.run()
    h.check(request)


def test_the_token_budget_stays_the_upper_bound(harness: Callable[..., Any]) -> None:
    h = harness(max_num_batched_tokens=16, pace=_pace(60.0))
    h.add("long", 100)
    assert h.step().num_tokens == 16


def test_a_short_prompt_is_computed_beside_a_long_one(harness: Callable[..., Any]) -> None:
    h = harness(max_num_batched_tokens=32, max_num_partial_prefills=2)
    long, short = h.add("long", 100), h.add("short", 10)
    plan = h.step()
    assert sorted(work.num_tokens for work in plan.work) == [10, 22]
    assert short.metrics.first_token_s is not None and long.metrics.first_token_s is None
    h.run()
    h.check(long)
    h.check(short)


def test_short_prompts_leave_a_long_one_half_of_each_step(harness: Callable[..., Any]) -> None:
    h = harness(max_num_batched_tokens=32, max_num_partial_prefills=8, num_blocks=128)
    long = h.add("long", 110, max_tokens=1)
    for number in range(24):
        h.add(f"short{number}", 8, max_tokens=1)
    for _ in range(7):
        plan = h.step()
        assert _tokens(plan, 0) >= 14, "110 tokens are six times 16 and 14"
    assert long.is_finished
    h.run()


def test_a_prompt_of_several_steps_gets_three_quarters_beside_one_that_is_much_longer(
    harness: Callable[..., Any],
) -> None:
    h = harness(
        max_num_batched_tokens=128, max_model_len=512, max_num_partial_prefills=2,
        num_blocks=256, pace=_pace(0.021),
    )  # fmt: skip
    h.add("stream", 8, max_tokens=200)
    h.step()
    long = h.add("long", 400, max_tokens=1)
    h.step()
    short = h.add("short", 60, max_tokens=1)
    chunks = [h.step() for _ in range(2)]
    assert [_tokens(plan, 2) for plan in chunks] == [31, 29], "two targets hold 42 tokens"
    assert [_tokens(plan, 1) for plan in chunks] == [8, 12], "in whole fours"
    assert short.is_finished and not long.is_finished
    h.run()


@pytest.mark.slow
def test_shorter_prompts_without_end_do_not_starve_a_long_one(harness: Callable[..., Any]) -> None:
    """What they leave is less than a quantum."""
    h = harness(
        max_num_batched_tokens=128, max_model_len=512, max_num_partial_prefills=4,
        num_blocks=256, pace=_pace(0.009),
    )  # fmt: skip
    h.add("stream", 8, max_tokens=400)
    h.step()
    long = h.add("long", 120, max_tokens=1)
    for number in range(200):
        h.add(f"shorter{number}", 12, max_tokens=1)
        h.step()
        if long.is_finished:
            break
    assert long.is_finished and number > 10
    h.run()


def test_with_one_partial_prefill_prompts_are_served_strictly_in_order(
    harness: Callable[..., Any],
) -> None:
    h = harness(max_num_batched_tokens=32, max_num_partial_prefills=1)
    h.add("long", 100)
    h.add("short", 10)
    assert [work.num_tokens for work in h.step().work] == [32]


def test_long_prompts_share_a_step_where_they_may(harness: Callable[..., Any]) -> None:
    h = harness(max_num_batched_tokens=32, max_num_partial_prefills=2, max_long_partial_prefills=2)
    h.add("a", 100)
    h.add("b", 100)
    assert [work.num_tokens for work in h.step().work] == [16, 16]


def test_a_threshold_says_which_prompts_are_long(harness: Callable[..., Any]) -> None:
    h = harness(
        max_num_batched_tokens=32, max_num_partial_prefills=2, long_prefill_token_threshold=5
    )
    h.add("a", 100)
    h.add("b", 10)
    assert [work.num_tokens for work in h.step().work] == [32]


def test_no_more_prompts_are_under_way_than_the_limit_says(harness: Callable[..., Any]) -> None:
    h = harness(max_num_batched_tokens=16, max_num_partial_prefills=2, num_blocks=200)
    for number in range(5):
        h.add(f"long{number}", 100)
    h.step()
    assert len(h.scheduler.running) == 2


def test_a_step_planned_ahead_is_measured_from_the_end_of_the_one_before_it() -> None:
    pace, work = _pace(0.050), StepWork(1, 1, 1, 1, 10, 10.0)
    forecast = pace.forecast([RowWork(0, 9, 1, ONE_SAMPLE)])
    assert forecast.work == work
    assert pace.measure(forecast, 0.020, now=1.0) == pytest.approx(0.020)
    assert pace.measure(forecast, 0.040, now=1.025) == pytest.approx(0.025)


def test_durations_are_predicted_measured_and_counted(harness: Callable[..., Any]) -> None:
    h = harness(pace=_pace(0.050))
    h.add("a", 10, max_tokens=3)
    h.run()
    stats = h.scheduler.stats
    assert (
        sum(stats.num_steps_by_duration) == stats.num_steps == h.scheduler.pace.model.num_observed
    )
    assert stats.predicted_s == pytest.approx(stats.measured_s) and stats.predicted_s > 0.0


def test_without_a_pace_nothing_is_timed(harness: Callable[..., Any]) -> None:
    h = harness()
    h.add("a", 10, max_tokens=3)
    h.run()
    assert sum(h.scheduler.stats.num_steps_by_duration) == 0
