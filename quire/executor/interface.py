"""The executor protocol: the data plane as the engine sees it."""

from __future__ import annotations

from typing import Protocol

from quire.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """Carries out step plans, one after the other."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's row changes, compute its work, sample; blocks until the result is there.

        A row that fails alone (non-finite numbers, a processor that raises) is reported in its `WorkResult`. An exception
        means that the executor itself is broken and must be replaced.
        """
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
