"""A rank that is lost costs the step, also where a companion is the first to meet it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from quire.core.plan import CompanionError, StepPlan
from quire.errors import EngineError
from quire.executor.interface import StepLostError
from quire.executor.ranks import MAX_LOSSES, RanksExecutor
from quire.parallel.group import GroupLostError


class Group:
    """A group that can be lost."""

    def __init__(self, *, is_lost: bool) -> None:
        self.shape, self.num_restarts = SimpleNamespace(size=2), 0
        self._is_lost = is_lost
        self._num_looks = 0

    @property
    def is_lost(self) -> bool:
        self._num_looks += 1  # at the first look, before the step, nothing is wrong
        return self._is_lost and self._num_looks > 1

    def restart(self) -> None:
        self.num_restarts += 1


class Losing:
    """A group that is always lost, and can be replaced from a certain time on."""

    def __init__(self, num_failures: int) -> None:
        self.shape, self.is_lost = SimpleNamespace(size=2), True
        self._num_failures = num_failures

    def restart(self) -> None:
        self._num_failures -= 1
        if self._num_failures >= 0:
            raise EngineError("the folder is not there")


def test_several_losses_in_a_row_cost_the_requests_of_a_step_but_not_what_could_not_be_tried() -> (
    None
):
    worker: Any = None
    executor = RanksExecutor(worker, None, Losing(5))  # type: ignore[arg-type]
    for _ in range(5):
        with pytest.raises(EngineError, match="the folder is not there"):
            executor.launch(StepPlan(1, ()))
    costs = []
    for _ in range(MAX_LOSSES + 2):
        with pytest.raises(StepLostError) as lost:
            executor.launch(StepPlan(1, ()))
        costs.append(lost.value.costs_requests)
    assert costs == [False] * MAX_LOSSES + [True, False]


def _executor(group: Group, error: Exception) -> RanksExecutor:
    def launch(plan: StepPlan) -> NoReturn:
        raise CompanionError("tiers") from error

    worker: Any = SimpleNamespace(launch=launch)
    return RanksExecutor(worker, None, group)  # type: ignore[arg-type]


def test_a_companion_that_meets_a_lost_rank_loses_the_step_and_no_request() -> None:
    group = Group(is_lost=True)
    with pytest.raises(StepLostError, match="rank 1 gives no sign of life"):
        _executor(group, GroupLostError("rank 1 gives no sign of life")).launch(StepPlan(1, ()))
    assert group.num_restarts == 1


def test_a_companion_that_fails_by_itself_is_told_as_such() -> None:
    group = Group(is_lost=False)
    with pytest.raises(CompanionError, match="tiers"):
        _executor(group, OSError("the disk is full")).launch(StepPlan(1, ()))
    assert group.num_restarts == 0
