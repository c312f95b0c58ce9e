"""The model of step costs: what it counts, how it learns,
and that chunk lengths fit the time they are given."""

from __future__ import annotations

import json
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.plan import ONE_SAMPLE, RowWork
from quire.core.step_cost import StepCostModel, StepWork, UnitCosts, work_of

# Of the order of a model of 0.6 billion parameters on two cores with AVX2.
_TRUE = UnitCosts(0.030, 0.010, 0.005, 0.002, 3e-6, 2e-6)


def _scaled(costs: UnitCosts, *factors: float) -> UnitCosts:
    return UnitCosts(*(cost * factor for cost, factor in zip(costs, factors * 6, strict=False)))


def _decodes(num_rows: int, context: int) -> list[RowWork]:
    return [RowWork(row, context, 1, ONE_SAMPLE) for row in range(num_rows)]


def _mixed(random: Random) -> list[RowWork]:
    """A step as a server has them: some decodes, and sometimes a chunk."""
    work = _decodes(random.randint(0, 8), random.randint(10, 2000))
    if not work or random.random() < 0.5:
        start, num_tokens = random.choice((0, 256, 1024)), random.choice((16, 48, 128))
        work.append(RowWork(99, start, num_tokens, ONE_SAMPLE[: random.randint(0, 1)]))
    return work


def _seconds(costs: UnitCosts, work: StepWork) -> float:
    return sum(cost * amount for cost, amount in zip(costs, work, strict=True))


def test_work_counts_tokens_contexts_and_pairs() -> None:
    assert work_of([]) == StepWork()
    assert work_of([RowWork(0, 9, 1, ONE_SAMPLE), RowWork(1, 19, 1, ONE_SAMPLE)]) == StepWork(
        1, 1, 2, 2, 30, 30.0
    )
    # A chunk of 4 tokens from position 8 on: queries see 8, 9, 10 and 11 earlier keys, and half of
    # a step each of their own.
    assert work_of([RowWork(0, 9, 1, ONE_SAMPLE), RowWork(1, 8, 4)]) == StepWork(
        1, 1, 5, 1, 22, 9.5 + 40.0
    )
    assert work_of([RowWork(0, 0, 4)]).num_heads == 0


def test_predictions_come_close_after_a_few_steps_whatever_the_estimate_was() -> None:
    for factors in ((3.0,), (0.3,), (0.4, 2.5), (2.5, 0.4)):
        random, model = Random(0), StepCostModel(_scaled(_TRUE, *factors))
        for _ in range(40):
            work = work_of(_mixed(random))
            model.observe(work, _seconds(_TRUE, work) * random.uniform(0.95, 1.05))
        errors = []
        for _ in range(50):
            work = work_of(_mixed(random))
            errors.append(abs(model.seconds(work) / _seconds(_TRUE, work) - 1.0))
        assert sorted(errors)[45] < 0.15, f"estimates off by {factors}"


def test_an_interrupted_step_moves_predictions_little() -> None:
    random, model = Random(1), StepCostModel(_TRUE)
    for _ in range(200):
        work = work_of(_mixed(random))
        model.observe(work, _seconds(_TRUE, work) * random.uniform(0.97, 1.03))
    work = work_of(_decodes(4, 500))
    before = model.seconds(work)
    model.observe(work, 100 * before)
    assert model.seconds(work) < 1.25 * before


def test_a_machine_that_becomes_slower_is_followed() -> None:
    random, model = Random(2), StepCostModel(_TRUE)
    for scale in (1.0, 1.6):
        for _ in range(150):
            work = work_of(_mixed(random))
            model.observe(work, scale * _seconds(_TRUE, work) * random.uniform(0.97, 1.03))
    work = work_of([*_decodes(4, 500), RowWork(9, 0, 64)])
    assert model.seconds(work) == pytest.approx(1.6 * _seconds(_TRUE, work), rel=0.15)


def test_long_runs_of_equal_steps_leave_other_costs_alone() -> None:
    """Thousands of decodes say nothing of prompts;
    nor may uncertainty grow without a bound meanwhile."""
    random, model = Random(3), StepCostModel(_TRUE)
    for _ in range(5000):
        work = work_of(_decodes(1, 100))
        model.observe(work, _seconds(_TRUE, work) * random.uniform(0.9, 1.1))
    prompt = work_of([RowWork(0, 0, 256)])
    assert model.seconds(prompt) == pytest.approx(_seconds(_TRUE, prompt), rel=0.5)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 100_000), st.floats(0.0, 1e9)), max_size=30
    )
)
def test_coefficients_stay_positive_and_finite(steps: list[tuple[int, int, float]]) -> None:
    model = StepCostModel(_TRUE)
    for num_tokens, start, measured_s in steps:
        model.observe(work_of([RowWork(0, start, num_tokens)] if num_tokens else []), measured_s)
    assert all(math.isfinite(unit) and unit > 0.0 for unit in model.units())


@given(st.floats(0.0, 10.0), st.integers(0, 50_000), st.integers(1, 5000))
def test_a_chunk_is_as_long_as_fits(seconds: float, start: int, most: int) -> None:
    model = StepCostModel(_TRUE)
    count = model.chunk_len(seconds, start, most)
    assert 0 <= count <= most
    assert count == 0 or model.chunk_s(start, count) <= seconds * (1 + 1e-9)
    assert count == most or model.chunk_s(start, count + 1) > seconds * (1 - 1e-9)


def test_a_chunk_costs_what_its_step_costs_more() -> None:
    model, decodes = StepCostModel(_TRUE), _decodes(3, 100)
    chunk = RowWork(9, 512, 64)
    more = model.seconds(work_of([*decodes, chunk])) - model.seconds(work_of(decodes))
    assert more == pytest.approx(model.chunk_s(512, 64), rel=1e-4)  # decodes count half a pair less


def test_what_was_learned_is_taken_over_by_the_next_run() -> None:
    random, model = Random(4), StepCostModel(_scaled(_TRUE, 0.4))
    for _ in range(100):
        work = work_of(_mixed(random))
        model.observe(work, _seconds(_TRUE, work))
    saved = json.loads(json.dumps(model.saved()))
    later = StepCostModel(_scaled(_TRUE, 0.4))
    assert later.restore(saved)
    assert later.units() == model.units()


@pytest.mark.parametrize(
    "change",
    [
        {"estimate": [1.0] * 6},
        {"ratios": [1.0] * 5},
        {"ratios": [float("nan")] * 6},
        {"ratios": [-1.0] * 6},
        {"ratios": ["1"] * 6},
        {"ratios": None},
    ],
)
def test_foreign_or_damaged_records_change_nothing(change: dict[str, object]) -> None:
    model = StepCostModel(_TRUE)
    assert not model.restore({**model.saved(), **change})
    assert model.units() == _TRUE
