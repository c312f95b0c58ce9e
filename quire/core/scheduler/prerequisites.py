"""Prerequisites: what a sequence needs before it may run and what the data plane makes ready beside
the steps.

A prerequisite is not scarce, as a `Resource` is: a sequence that lacks one is parked, and those
behind it go first. It is the control plane's half of a feature; the other half is a
`quire.worker.companions.Companion` of the same name. They exchange records in
`StepPlan.orders[name]` and `StepResult.news[name]`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol, runtime_checkable

from quire.core.plan import Record
from quire.core.request import Sequence
from quire.core.scheduler.resources import KVBlocks


class WaitCondition(Protocol):
    """Something that a sequence waits for without holding up those behind it."""

    def refusal(self, sequence: Sequence) -> str | None:
        """Say why the sequence must be parked; None where it may run. Changes nothing."""
        ...

    def park(self, sequence: Sequence) -> None:
        """Keep a refused sequence until what it waits for is there."""
        ...

    def unpark(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; it need not be parked here."""
        ...

    def parked(self) -> Collection[Sequence]:
        """List the sequences that wait here: for pictures and checks."""
        ...


class Settled(NamedTuple):
    """Sequences that wait no more; `error` says why they cannot be served, where they cannot."""

    sequences: list[Sequence]
    error: str | None = None


class Prerequisite(WaitCondition, Protocol):
    """The control plane's half of one feature."""

    @property
    def name(self) -> str:
        """The key of its orders and news."""
        ...

    def take_orders(self, now: float) -> tuple[Record, ...]:
        """Return what no plan has ordered yet; the plan that is made now carries it."""
        ...

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        """Take in what a result brought, possibly nothing, and return the sequences whose wait is
        over.

        Called for every result, so that a deadline can end a wait: nothing may wait for ever.
        """
        ...

    def lose_flights(self) -> None:
        """Forget what steps in flight have ordered, and order it again where it is still needed.

        Plans that were made may not have been launched, and news of results that were not taken in
        will not come again. No sequence runs.
        """
        ...


@runtime_checkable
class Retained(Protocol):
    """A prerequisite that must stay ready as long as sequences run that need it,
    and so is told of these."""

    def retain(self, sequence: Sequence) -> None:
        """The sequence runs from now on."""
        ...

    def release(self, sequence: Sequence) -> None:
        """It runs no more."""
        ...


@runtime_checkable
class BlockUser(Protocol):
    """A prerequisite that puts something into blocks, and learns of what is in them."""

    @property
    def has_orders(self) -> bool:
        """Whether the next plan should carry something even if there is no request left."""
        ...

    def attach(self, blocks: KVBlocks) -> None:
        """Learn which blocks they are. Called once, before anything else."""
        ...
