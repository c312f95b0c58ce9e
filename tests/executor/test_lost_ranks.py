"""A rank that is lost costs the step, also where a companion is the first to meet it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from quire.core.plan import CompanionError, StepPlan
from quire.errors import ConfigError, EngineError
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
    """A group that is always lost, and can be replaced once that has failed in some ways."""

    def __init__(self, *failures: EngineError | ConfigError) -> None:
        self.shape, self.is_lost = SimpleNamespace(size=2), True
        self._failures = list(failures)

    def restart(self) -> None:
        if self._failures:
            raise self._failures.pop(0)


def test_several_losses_in_a_row_cost_the_requests_of_a_step_but_not_what_could_not_be_tried() -> (
    None
):
    executor = _losing(*[ConfigError("the folder is not there")] * 5)
    for _ in range(5):
        with pytest.raises(ConfigError, match="the folder is not there"):
            executor.launch(StepPlan(1, ()))
    assert _costs(executor, MAX_LOSSES + 2) == [False] * MAX_LOSSES + [True, False]


def test_a_rank_that_is_lost_while_it_replaces_another_counts_as_another_loss() -> None:
    executor = _losing(*[EngineError("a rank ended while it was loading")] * 2)
    assert _costs(executor, MAX_LOSSES + 2) == [False] * MAX_LOSSES + [True, False]


def _losing(*failures: EngineError | ConfigError) -> RanksExecutor:
    worker: Any = None
    return RanksExecutor(worker, None, Losing(*failures))  # type: ignore[arg-type]


def _costs(executor: RanksExecutor, num_steps: int) -> list[bool]:
    """Whether the losses of so many steps cost their requests."""
    costs = []
    for _ in range(num_steps):
        with pytest.raises(StepLostError) as lost:
            executor.launch(StepPlan(1, ()))
        costs.append(lost.value.costs_requests)
    return costs


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
