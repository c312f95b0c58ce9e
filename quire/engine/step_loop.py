"""The loop of every engine: its three verbs, and what happens when one of them fails.

    plan = scheduler.schedule(now)          # control plane: which tokens of which sequences, in which blocks
    result = executor.execute(plan)         # data plane: one forward pass and the sampling
    progress = scheduler.update(plan, result, now)

In which order they follow each other is said in `quire.engine.loops`. Knows requests as token ids: texts are `Engine`'s
business, messages to another process those of `quire.engine.process`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from quire.common.failures import log_failure
from quire.config.limits import SchedulerLimits
from quire.core.plan import StepPlan, StepResult, WorkResult
from quire.core.request import FinishReason, Sequence, SequenceRecord
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.scheduler import Progress, Scheduler
from quire.engine.loops import Loop, PlainLoop
from quire.engine.recorder import StepRecorder
from quire.engine.step_costs import StepCostFile
from quire.executor.interface import Executor, Launched

logger = logging.getLogger(__name__)


class StepLoop:
    """A scheduler, an executor, and an order of the verbs between them, by default the plain one."""

    def __init__(
        self,
        limits: SchedulerLimits,
        executor: Executor,
        clock: Callable[[], float],
        loop: Loop | None = None,
        *,
        pace: StepPace | None = None,
        cost_file: StepCostFile | None = None,
    ) -> None:
        """`pace` bounds the duration of steps; `cost_file` keeps what it learns for the next run."""
        self.executor = executor
        self.loop: Loop = PlainLoop() if loop is None else loop
        self._limits = limits
        self._clock = clock
        self._pace, self._cost_file = pace, cost_file
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
        """Go on until one step has been taken in. Never raises for a bug or a broken executor.

        An executor that fails costs the requests of that step; anything else that raises costs all of them.
        """
        try:
            return self.loop.advance(self)
        except Exception as error:
            log_failure(logger, "the engine failed outside of the executor and starts over", error)
            return self.start_over(f"the engine failed on this step: {type(error).__name__}")

    def idle(self) -> bool:
        """Make use of a moment without requests, for some milliseconds; whether there may be more to do. Never raises for a
        bug or a broken executor."""
        assert not self.has_work
        if self.scheduler.flights:
            self.advance()  # a step that was planned ahead for those who have ended
            return True
        try:
            if self._cost_file is not None:
                self._cost_file.save_if_due()
            return self.executor.idle()
        except Exception as error:
            log_failure(logger, "the engine failed while it was idle", error)
            return False

    # -- the verbs ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """See `quire.engine.loops.Control`, as for the next five."""
        now = self._clock()
        return self._begun(self.scheduler.schedule(now), now)

    def schedule_ahead(self) -> StepPlan | None:
        now = self._clock()
        plan = self.scheduler.schedule_ahead(now)
        return None if plan is None else self._begun(plan, now)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.executor.execute(plan)

    def launch(self, plan: StepPlan) -> Launched:
        return self.executor.launch(plan)

    def update(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        progress = self.scheduler.update(plan, result, self._clock())
        if self.recorder is not None:
            self.recorder.end(self._clock())
        return progress

    def abandon(self, plan: StepPlan, error: Exception) -> list[Progress]:
        """End the requests of a step that was lost; nobody knows what the worker still holds, so all others start anew."""
        log_failure(logger, f"the executor failed on step {plan.step_id}", error)
        message = f"the engine failed on this step: {type(error).__name__}"
        progress = self.update(plan, StepResult(plan.step_id, tuple(WorkResult(error=message) for _ in plan.work)))
        self.rewind()
        return progress

    def rewind(self) -> None:
        """Forget the steps in flight and take everyone's blocks away, to be computed again."""
        self.scheduler.lose_flights()
        if self.recorder is not None:
            self.recorder.forget_open()

    def _begun(self, plan: StepPlan, now: float) -> StepPlan:
        if self.recorder is not None:
            self.recorder.begin(plan, now)
        return plan

    # -- for an output processor (`Ends`) ---------------------------------------------------------------------------

    def stop(self, sequence: SequenceRecord, matched: str) -> None:
        """End a sequence whose text has reached a stop string."""
        assert isinstance(sequence, Sequence)
        self.scheduler.finish(sequence, FinishReason.STOP, matched)

    def fail(self, request_id: str, message: str) -> None:
        """End a request whose output cannot be made."""
        self.scheduler.fail(request_id, message)

    # -- failures ----------------------------------------------------------------------------------------------------

    def start_over(self, message: str) -> list[Progress]:
        """End every request and begin with an empty control plane: this one may be half-way through a change.

        The worker need not be told: a row begins anew with its next owner, and nothing in the new pool counts as cached.
        Returns the ends of all sequences that were lost: also of requests that the failed step has ended, untold.
        """
        self.loop.forget()
        in_flight = [sequence.request for flight in self.scheduler.flights for sequence in flight.sequences]
        lost = dict.fromkeys([*self.scheduler.give_up(message), *in_flight])
        for request in lost:
            request.error = request.error or message
        stats, self.scheduler = self.scheduler.stats, self._new_scheduler()
        self.scheduler.stats = stats
        if self.recorder is not None:
            self.record_steps()
        return [Progress(sequence, None, None) for request in lost for sequence in request.sequences]

    def close(self) -> None:
        """End what computes, and free the memory. Idempotent."""
        self.loop.close()
        self.executor.close()
        if self._cost_file is not None:
            self._cost_file.save()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._limits, digest_key=os.urandom(16), pace=self._pace)
