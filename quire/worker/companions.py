"""Companions: the worker's halves of features whose other half, a `Prerequisite` of the same name,
the control plane has.

A companion makes ready what it is ordered, beside the steps, and says so. The worker passes records
on and reads none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.core.plan import CompanionError, Record, StepPlan

_WAIT_S = 0.005
"""A step without work waits so long for news: requests may come, or leave, meanwhile."""


class Companion(Protocol):
    """The worker's half of one feature."""

    @property
    def name(self) -> str:
        """The key of its orders and news."""
        ...

    def begin(self, plan: StepPlan) -> None:
        """Take the orders of a plan and note which rows it removes and begins. Returns at once;
        the step comes after it."""
        ...

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        """Return what has happened since the last call;
        wait so long for a first record where one is to come."""
        ...

    def close(self) -> None:
        """End what works beside the steps. Idempotent."""
        ...


class Companions:
    """The companions of one executor."""

    def __init__(self, companions: Iterable[Companion] = ()) -> None:
        self._all = tuple(companions)
        self._names = {each.name for each in self._all}

    def of(self, name: str) -> Companion:
        """Return the companion of this name."""
        (found,) = (each for each in self._all if each.name == name)
        return found

    def begin(self, plan: StepPlan) -> None:
        """Hand a plan to every companion, before its changes are applied. Raises CompanionError
        where one of them does."""
        assert plan.orders.keys() <= self._names, (
            f"orders for {plan.orders.keys() - self._names}, which this executor lacks"
        )
        for each in self._all:
            try:
                each.begin(plan)
            except Exception as error:
                raise CompanionError(each.name) from error

    def take_news(self, plan: StepPlan) -> dict[str, tuple[Record, ...]]:
        """Collect the news for the result of a plan. Raises CompanionError where a companion
        raises: what it had to say is lost."""
        wait_s = 0.0 if plan.work else _WAIT_S
        news = dict[str, tuple[Record, ...]]()
        for each in self._all:
            try:
                records = each.take_news(wait_s)
            except Exception as error:
                raise CompanionError(each.name) from error
            if records:
                news[each.name] = records
        return news

    def close(self) -> None:
        """Close every companion. Idempotent."""
        for each in self._all:
            each.close()
