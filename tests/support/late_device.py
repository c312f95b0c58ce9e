"""A device that is behind the host, without a GPU: what it computed reaches the host only once the
next step is launched.

Operations are those of the CPU. Their results are withheld by the readback: whoever waits for them
before the next step has been launched, though one is planned, waits in vain until the deadline,
which fails the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from quire.core.plan import StepPlan
from quire.engine.loop.engine import Engine
from quire.engine.loop.step_loop import OverlappedLoop
from quire.worker.last_tokens import Arrival

DEADLINE_S = 20.0
"""Generous: a step of the tests' models takes milliseconds."""


class LateDevice:
    """The readback of an engine's worker. With the overlapped loop results are late,
    with the plain one there at once."""

    def __init__(self, engine: Engine) -> None:
        self._worker: Any = engine.executor.worker  # type: ignore[attr-defined]
        self._moved = threading.Condition()
        self._num_planned = self._num_launched = 0
        self.num_late = 0
        """Steps whose results were still withheld when the next one had been launched."""
        self.num_steps = 0
        """Steps that were read late at all."""
        self._wrap(self._worker, "launch", self._launch)
        if isinstance(engine.loop, OverlappedLoop):
            self._wrap(engine.loop._launcher, "submit", self._submit)
        self._worker.read_late(self)

    def __call__(self, tensors: Sequence[Tensor]) -> Arrival:
        copies, step = [tensor.clone() for tensor in tensors], self._num_launched
        self.num_steps += 1

        def wait() -> list[Tensor]:
            with self._moved:
                if not self._moved.wait_for(lambda: self._is_behind(step), DEADLINE_S):
                    raise TimeoutError("a step waits for the results of the one before it")
                self.num_late += self._num_launched > step + 1
            return copies

        return wait

    def _is_behind(self, step: int) -> bool:
        """Whether the next step has been launched, or there is none yet."""
        return self._num_launched > step + 1 or self._num_planned <= step + 1

    def _submit(self, inner: Callable[..., None], launch: Any, plan: StepPlan) -> None:
        with self._moved:
            self._num_planned += plan.step_id >= 0
        inner(launch, plan)

    def _launch(self, inner: Callable[[StepPlan], Any], plan: StepPlan) -> Any:
        launched = inner(plan)
        with self._moved:
            self._num_launched += 1
            self._moved.notify_all()
        return launched

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(inner, *args, **kwargs))
