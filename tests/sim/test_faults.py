"""Faults are injected when they are due, and not afterwards."""

from random import Random

from quire.core.plan import ONE_SAMPLE, RowWork, StepPlan, StepResult, WorkResult
from quire.executor.null import NullExecutor
from quire.sim.faults import FaultInjector
from quire.sim.scenario import Faults

_PLAN = StepPlan(1, work=(RowWork(0, 0, 1, ONE_SAMPLE), RowWork(1, 0, 1, ONE_SAMPLE)))
_RESULT = StepResult(1, (WorkResult((1,)), WorkResult((2,))))


def _spoil(faults: Faults, step: int) -> StepResult:
    return FaultInjector(faults, Random(0)).spoil(_PLAN, _RESULT, NullExecutor(2, 4, 4), step)


def test_one_row_fails() -> None:
    errors = [result.error for result in _spoil(Faults(5, row_error=1.0), 0).results]
    assert sorted(error is None for error in errors) == [False, True]


def test_a_whole_step_fails() -> None:
    assert all(result.error for result in _spoil(Faults(5, step_error=1.0), 0).results)


def test_nothing_happens_after_the_last_step() -> None:
    assert _spoil(Faults(5, row_error=1.0, step_error=1.0, poison=1.0), 5) == _RESULT
