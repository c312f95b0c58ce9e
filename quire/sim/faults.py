"""Fault injection into a running simulation, each fault drawn from the scenario's seed.

It acts through the scheduler's public methods, except that it can force a preemption where none is
needed.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from quire.core.plan import StepPlan, StepResult, WorkResult
from quire.core.request import Sequence
from quire.core.scheduler.scheduler import Scheduler
from quire.executor.null import NullExecutor
from quire.sim.scenario import Faults


def force_preemption(scheduler: Scheduler, sequence: Sequence) -> None:
    """Preempt a running sequence between two steps, needed or not."""
    scheduler.planner.preempt(sequence)


class FaultInjector:
    """Injects the faults of one run. Without a fault due,
    it changes nothing but its own random state."""

    def __init__(self, faults: Faults, random: Random) -> None:
        self.faults = faults
        self.random = random
        self.num_strikes = 0

    def strike_between_steps(self, scheduler: Scheduler, step: int) -> None:
        """Abort, force a preemption, forget the cache: whichever is due."""
        faults = self.faults
        if self._strikes(faults.abort, step):
            scheduler.abort(self._any_request(scheduler))
        if self._strikes(faults.preempt, step) and scheduler.running:
            force_preemption(scheduler, self.random.choice(scheduler.running))
        if self._strikes(faults.forget_cache, step):
            scheduler.reset_prefix_cache()

    def strike_in_flight(self, scheduler: Scheduler, step: int) -> None:
        """Abort a request while the step runs, where that is due."""
        if self._strikes(self.faults.abort_in_flight, step):
            scheduler.abort(self._any_request(scheduler))

    def spoil(
        self, plan: StepPlan, result: StepResult, executor: NullExecutor, step: int
    ) -> StepResult:
        """Return the result with faults in it."""
        if not plan.work:
            return result
        results = list(result.results)
        if self._strikes(self.faults.row_error, step):
            results[self.random.randrange(len(results))] = WorkResult(
                error="injected: the row failed"
            )
        if self._strikes(self.faults.poison, step):
            place = self.random.randrange(len(results))
            work = plan.work[place]
            first = self.random.randint(work.start, work.start + work.num_tokens - 1)
            executor.poison(work.row, first, work.start + work.num_tokens)
            results[place] = WorkResult(error="injected: non-finite numbers")
        if self._strikes(self.faults.step_error, step):
            results = [WorkResult(error="injected: the step failed")] * len(results)
        return replace(result, results=tuple(results))

    def _strikes(self, probability: float, step: int) -> bool:
        is_due = step < self.faults.last_step and self.random.random() < probability
        self.num_strikes += is_due
        return is_due

    def _any_request(self, scheduler: Scheduler) -> str:
        return self.random.choice([*scheduler.requests, "unknown"])
