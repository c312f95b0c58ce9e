"""The executor protocol: the data plane as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.core.plan import StepPlan, StepResult
from quire.errors import EngineError

Launched = Callable[[], StepResult]
"""A step on its way: waits for its result, and gives it. May be called in any thread, once."""


class StepLostError(EngineError):
    """What the executor held is lost, and so is the step; the executor has what it needs to go on.
    Nothing that was cached may be found again."""

    def __init__(self, message: str, *, costs_requests: bool = False) -> None:
        """`costs_requests`: those of the step are taken for the cause. Else no request is: all may
        be computed again."""
        super().__init__(message)
        self.costs_requests = costs_requests


class Executor(Protocol):
    """Carries out step plans, one after the other."""

    def launch(self, plan: StepPlan) -> Launched:
        """Apply the plan's row changes, begin to compute its work and to sample.

        The next plan may be launched before the result of this one is read: it finds the rows
        as this one leaves them. A row that fails alone (non-finite numbers, a processor that
        raises) is reported in its `WorkResult`. An exception, here or from the wait, means that the
        executor itself is broken and must be replaced; `StepLostError`, that it has been.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """`launch`, and wait for the result."""
        ...

    def register_processor(self, processor: Callable[..., Any]) -> str:
        """Make a per-request logits processor known;
        returns the name by which plans refer to it."""
        ...

    def unregister_processor(self, name: str) -> None:
        """Forget a processor."""
        ...

    def idle(self) -> bool:
        """Make use of a moment in which there is no plan, for some milliseconds;
        whether there may be more to do."""
        ...

    def sleep(self, level: int) -> None:
        """Give the memory of the weights and of the KV cache back to the system, the weights kept
        in a file (1) or discarded (2). Nothing is in flight, and nothing is launched until all is
        back. Raises NotAvailableError or EngineError, with everything as it was."""
        ...

    def wake(self, parts: Sequence[str]) -> None:
        """Bring some of `quire.common.residence.PARTS` back: weights with the same bits, a KV cache
        of any content. Raises CheckpointError or EngineError."""
        ...

    def load_weights(self, source: Any) -> Any:
        """Load other weights, of a folder or of tensors by name, beside those in memory. For any
        thread; steps may go on. Raises a QuireError."""
        ...

    def replace_weights(self, loaded: Any) -> None:
        """Compute with weights that `load_weights` returned from the next step on. Nothing is in
        flight. Raises CheckpointError, and changes nothing, for those of another form."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
