"""The worker's half of experts of which only some are in memory: it tells how they were used."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.experts import EXPERTS, ExpertUse
from quire.core.plan import Record, StepPlan


class ExpertReports:
    """Implements `Companion`."""

    name = EXPERTS

    def __init__(self, count: Callable[[], ExpertUse]) -> None:
        """`count` returns the use in all; what was used before is not told."""
        self._count, self._told = count, count()

    def begin(self, plan: StepPlan) -> None:
        """See `Companion.begin`: nothing is ordered."""

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        """See `Companion.take_news`: nothing is waited for."""
        now = self._count()
        news, self._told = now.minus(self._told), now
        return (news,) if any(news) else ()

    def close(self) -> None:
        """See `Companion.close`."""
