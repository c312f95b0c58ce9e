"""Whom to preempt when memory runs out, and what it costs.

A victim must rank below the sequence that needs the memory and must have gained a token since it
was last admitted, so that no sequence is preempted twice without progress in between. Among those,
the cheapest is taken: fewest tokens to compute again, not counting blocks that others hold as well
(these survive the victim). With windows all tokens count, since the last window may be lost. A
lower priority class comes before cost.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.core.kvcache.manager import KVCacheManager
from quire.core.request import Sequence


class Preemption(NamedTuple):
    """A decision, for logs and metrics."""

    victim: Sequence
    beneficiary: Sequence | None
    num_recomputed_tokens: int
    """Estimate: computed tokens in blocks that no other sequence holds.
    Their blocks stay cached until they are needed."""
    num_freed_blocks: int

    def reason(self) -> str:
        """Return one line for the log."""
        cause = (
            f"{self.beneficiary.name} needs memory"
            if self.beneficiary is not None
            else "nothing else could run"
        )
        return (
            f"preempted {self.victim.name} ({self.num_freed_blocks} blocks freed, at most "
            f"{self.num_recomputed_tokens} tokens to compute again): {cause}"
        )


def assess(victim: Sequence, beneficiary: Sequence | None, manager: KVCacheManager) -> Preemption:
    """Return what preempting `victim` would free and cost."""
    num_blocks, num_tokens = manager.exclusive(victim.table, victim.num_computed)
    return Preemption(victim, beneficiary, num_tokens, num_blocks)


def choose_victim(
    candidates: list[Sequence], beneficiary: Sequence | None, manager: KVCacheManager
) -> Preemption | None:
    """Return the cheapest candidate of the lowest priority class that frees anything;
    the youngest among equals."""
    assessed = [
        assess(sequence, beneficiary, manager) for sequence in candidates if sequence.has_progressed
    ]
    useful = [preemption for preemption in assessed if preemption.num_freed_blocks > 0] or assessed
    return min(useful, key=_cost, default=None)


def _cost(preemption: Preemption) -> tuple[int, int, int, int]:
    priority, arrival, index = preemption.victim.rank
    return (-priority, preemption.num_recomputed_tokens, -arrival, -index)
