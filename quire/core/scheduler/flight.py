"""Steps on their way: what the scheduler remembers of a step from its plan to its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.request import Sequence
from quire.core.scheduler.pace import Forecast


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was planned and is not taken in yet."""

    step_id: int
    sequences: list[Sequence]
    """Whose work it holds, in the plan's order; never changed."""
    forecast: Forecast | None = None
    """How long it is expected to take; None where no pace is kept."""
    gone: set[Sequence] = field(default_factory=set)
    """Those of them that have left since: nothing comes of their work,
    even where they are back in the meantime."""
