"""The use of experts of which only some are in memory, added up.

Implements `Prerequisite`, though no sequence ever waits for it: experts are fetched within the step
that chooses them, since a step that has begun cannot be put aside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.core.experts import EXPERTS, ExpertUse
from quire.core.plan import Record
from quire.core.request import Sequence
from quire.core.scheduler.prerequisites import Prerequisite, Settled


class CountedExperts:
    """Implements `Prerequisite`."""

    name = EXPERTS

    def __init__(self) -> None:
        self.use = ExpertUse()
        """Of all steps whose results were taken in."""

    def refusal(self, sequence: Sequence) -> str | None:
        return None

    def park(self, sequence: Sequence) -> None:
        raise AssertionError("no sequence waits for experts")

    def unpark(self, sequence: Sequence) -> None:
        return

    def parked(self) -> list[Sequence]:
        return []

    def take_orders(self, now: float) -> tuple[Record, ...]:
        return ()

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        for each in news:
            self.use = self.use.plus(ExpertUse._make(each))
        return []

    def lose_flights(self) -> None:
        return


def expert_use(prerequisites: Iterable[Prerequisite]) -> dict[str, Any]:
    """Return the counts by the names of the engine's counters; nothing where none are kept."""
    for each in prerequisites:
        if isinstance(each, CountedExperts):
            return {
                "num_expert_hits": each.use.num_hits,
                "num_expert_misses": each.use.num_misses,
                "expert_bytes_read": each.use.bytes_read,
                "expert_wait_s": each.use.wait_s,
                "num_experts_forecast": each.use.num_forecast,
                "num_experts_foreseen": each.use.num_foreseen,
                "expert_bytes_ahead": each.use.bytes_ahead,
            }
    return {}
