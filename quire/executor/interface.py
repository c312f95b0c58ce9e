"""The executor protocol: the data plane as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from quire.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """Carries out step plans, one after the other."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's row changes, compute its work, sample; blocks until the result is there.

        A row that fails alone (non-finite numbers, a processor that raises) is reported in its `WorkResult`. An exception
        means that the executor itself is broken and must be replaced.
        """
        ...

    def register_processor(self, processor: Callable[..., Any]) -> str:
        """Make a per-request logits processor known; returns the name by which plans refer to it."""
        ...

    def unregister_processor(self, name: str) -> None:
        """Forget a processor."""
        ...

    def idle(self) -> bool:
        """Make use of a moment in which there is no plan, for some milliseconds; whether there may be more to do."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
