"""A rank that is lost costs the step, also where a companion is the first to meet it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from quire.core.plan import CompanionError, StepPlan
from quire.executor.interface import StepLostError
from quire.executor.ranks import RanksExecutor
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
