"""The loop of every engine, and what happens when one of its verbs fails.

    plan = scheduler.schedule(now)          # control plane: which tokens of which sequences, in which blocks
    result = executor.execute(plan)         # data plane: one forward pass and the sampling
    progress = scheduler.update(plan, result, now)

Knows requests as token ids: texts are `Engine`'s business, messages to another process those of `quire.engine.process`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from quire.common.failures import log_failure
from quire.config.limits import SchedulerLimits
from quire.core.plan import StepPlan, StepResult, WorkResult
from quire.core.request import Request
from quire.core.scheduler.scheduler import Progress, Scheduler
from quire.engine.recorder import StepRecorder
from quire.executor.interface import Executor

logger = logging.getLogger(__name__)


class StepLoop:
    """A scheduler and an executor, one step at a time."""

    def __init__(self, limits: SchedulerLimits, executor: Executor, clock: Callable[[], float]) -> None:
        self.executor = executor
        self._limits = limits
        self._clock = clock
        self.scheduler = self._new_scheduler()
        self.recorder: StepRecorder | None = None

    def record_steps(self) -> None:
        """Keep the last steps to be looked at. Before the first step."""
        self.recorder = StepRecorder(self.scheduler)

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self._clock()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def advance(self) -> list[Progress]:
        """One step. An executor that fails costs the requests of that step; anything else that raises calls for
        `start_over`."""
        now, recorder = self._clock(), self.recorder
        plan = self.scheduler.schedule(now)
        if recorder is not None:
            recorder.begin(plan, now)
        try:
            result = self.executor.execute(plan)
        except Exception as error:
            log_failure(logger, f"the executor failed on step {plan.step_id}", error)
            progress = self._abandon(plan, f"the engine failed on this step: {type(error).__name__}")
        else:
            progress = self.scheduler.update(plan, result, self._clock())
        if recorder is not None:
            recorder.end(self._clock())
        return progress

    def start_over(self, message: str) -> list[Request]:
        """End every request and begin with an empty control plane: this one may be half-way through a change.

        The worker need not be told: a row begins anew with its next owner, and nothing in the new pool counts as cached.
        Returns the requests that were lost.
        """
        lost = self.scheduler.give_up(message)
        stats, self.scheduler = self.scheduler.stats, self._new_scheduler()
        self.scheduler.stats = stats
        if self.recorder is not None:
            self.record_steps()
        return lost

    def _abandon(self, plan: StepPlan, message: str) -> list[Progress]:
        """End the requests of a step that was lost; nobody knows what the worker still holds, so all others start anew."""
        lost = StepResult(plan.step_id, tuple(WorkResult(error=message) for _ in plan.work))
        progress = self.scheduler.update(plan, lost, self._clock())
        self.scheduler.preempt_all()
        return progress

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._limits, digest_key=os.urandom(16))
