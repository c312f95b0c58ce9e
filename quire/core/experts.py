"""What the worker tells of experts of which only some are in memory: plain numbers, to be shown."""

from __future__ import annotations

from typing import NamedTuple

EXPERTS = "experts"
"""Of `StepResult.news`: an `ExpertUse`, where a step has used any."""


class ExpertUse(NamedTuple):
    """Since the news before, or in all."""

    num_hits: int = 0
    """Experts that a layer needed in a step, and that were in memory."""
    num_misses: int = 0
    """Those that were not."""
    bytes_read: int = 0
    """Of the experts' file."""
    wait_s: float = 0.0
    """That steps waited for it."""

    def plus(self, other: ExpertUse) -> ExpertUse:
        """Add up."""
        return ExpertUse(
            self.num_hits + other.num_hits,
            self.num_misses + other.num_misses,
            self.bytes_read + other.bytes_read,
            self.wait_s + other.wait_s,
        )

    def minus(self, other: ExpertUse) -> ExpertUse:
        """Subtract."""
        hits, misses, bytes_read, wait_s = other
        return self.plus(ExpertUse(-hits, -misses, -bytes_read, -wait_s))
