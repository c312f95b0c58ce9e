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
    num_forecast: int = 0
    """Experts that were not in memory and that the next layer would need, by its router's choice
    for the rows of the layer before it."""
    num_foreseen: int = 0
    """Those of them that it needed."""
    bytes_ahead: int = 0
    """Of experts that the system was asked to read while the layer before was computed."""

    def plus(self, other: ExpertUse) -> ExpertUse:
        """Add up."""
        return ExpertUse._make(a + b for a, b in zip(self, other, strict=True))

    def minus(self, other: ExpertUse) -> ExpertUse:
        """Subtract."""
        return ExpertUse._make(a - b for a, b in zip(self, other, strict=True))
