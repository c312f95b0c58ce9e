"""The loop of every engine: its three verbs, how they follow each other, and what happens when one
of them fails.

    plan = scheduler.schedule(now)                # control plane: which tokens, in which blocks
    result = executor.execute(plan)               # data plane: one forward pass, and sampling
    progress = scheduler.update(plan, result, now)

They follow each other one after the other, or with the next step planned while one runs:

    plain       schedule 1, execute 1, update 1, schedule 2, execute 2, update 2, ...
    overlapped  schedule 1, schedule 2, await 1, update 1, schedule 3, await 2, update 2, ...
                while 1, 2, 3 are launched

Both give the same tokens: the overlapped loop counts on what the step in flight will have computed,
never on which tokens come of it. It takes in each outcome while the next step runs, so a sequence
that ends has had a step too many, whose outcome is dropped, and a new one waits for a step more.

Knows requests as token ids: texts are `Engine`'s business, messages to another process those of
`quire.engine.process`.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from quire.common.failures import log_failure
from quire.common.residence import PARTS, WEIGHTS
from quire.config.limits import SchedulerLimits
from quire.core.plan import CompanionError, StepPlan, StepResult, WorkResult
from quire.core.request import FinishReason, Sequence, SequenceRecord
from quire.core.scheduler.look_ahead import LookAhead
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.prerequisites import Prerequisite
from quire.core.scheduler.scheduler import Progress, Scheduler
from quire.engine.loop.launchers import DirectLauncher, Launcher, StepThread
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.step_costs import StepCostFile
from quire.errors import EngineError, NotAvailableError, QuireError
from quire.executor.interface import Executor, Launched, StepLostError

if TYPE_CHECKING:
    from quire.engine.loop.recorder import StepRecorder

logger = logging.getLogger(__name__)


class StepLoop:
    """A scheduler, an executor, and an order of the verbs between them,
    by default the plain one."""

    def __init__(
        self,
        limits: SchedulerLimits,
        executor: Executor,
        clock: Callable[[], float],
        loop: Loop | None = None,
        *,
        prerequisites: Iterable[Callable[[], Prerequisite]] = (),
        pace: StepPace | None = None,
        cost_file: StepCostFile | None = None,
        look_ahead: Callable[[], LookAhead] | None = None,
        digest_key: bytes | None = None,
    ) -> None:
        """`prerequisites` make the halves whose others the executor has; `pace` bounds the duration
        of steps, and `cost_file` keeps what it learns for the next run; `look_ahead` makes what
        adds to steps; `digest_key` is that of cached blocks, by default one of no other engine.
        """
        self.executor = executor
        self.loop: Loop = PlainLoop() if loop is None else loop
        self._limits = limits
        self._clock = clock
        self._prerequisites = tuple(prerequisites)
        self._pace, self._cost_file = pace, cost_file
        self._look_ahead = look_ahead
        self._digest_key = os.urandom(16) if digest_key is None else digest_key
        self.scheduler = self._new_scheduler()
        self.recorder: StepRecorder | None = None
        self.asleep: tuple[str, ...] = ()
        """Parts of the memory (`quire.common.residence`) that are the system's at the moment; while
        there are any, no step is made."""

    is_paused = False
    """Whether `pause` holds the steps."""
    is_closed = False
    """Whether `close` was called, and the memory is gone."""
    is_torn = False
    """Whether the control plane may be half-way through a change: within one, and after Ctrl-C in
    one until `interrupted` has come to its end."""

    def require_open(self) -> None:
        """Raise EngineError where there is nothing left to ask."""
        if self.is_closed:
            raise EngineError("the engine is closed")

    def record_steps(self) -> None:
        """Keep the last steps to be looked at. Before the first step."""
        from quire.engine.loop.recorder import StepRecorder

        self.recorder = StepRecorder(self.scheduler)

    def now(self) -> float:
        """Return seconds on the engine's clock."""
        return self._clock()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    @property
    def can_step(self) -> bool:
        """Whether there is something to compute, and it can be."""
        return not self.asleep and not self.is_paused and self.scheduler.has_work

    def pause(self) -> None:
        """Make no step until `resume`; requests keep their blocks. Does nothing where it is
        paused."""
        self.require_open()
        self.is_paused = True

    def resume(self) -> None:
        """Go on after `pause`; the same answers. Does nothing where it is not paused."""
        self.require_open()
        self.is_paused = False

    def sleep(self, level: int) -> None:
        """Give the memory of weights and KV cache back until `wake_up`. Requests lose their blocks
        and are computed again then. Does nothing where it sleeps. Raises NotAvailableError or
        EngineError, and goes on.
        """
        self.require_open()
        if self.asleep:
            return
        if self.scheduler.admission.has_orders and not self.has_work:
            self.advance()  # blocks that were published last are yet to be stored
        with self._changing():
            self.loop.forget()
            self.rewind()
            self.scheduler.reset_prefix_cache()
            self.asleep = PARTS  # also where it is interrupted: what is gone is known below alone
            try:
                self.executor.sleep(level)
            except QuireError:
                self.asleep = ()
                raise

    def wake_up(self, parts: tuple[str, ...] = PARTS) -> None:
        """Bring parts of the memory back; steps are made once all are there. Raises a QuireError
        where one cannot be, and sleeps on."""
        self.require_open()
        for part in parts:
            if part in self.asleep:
                self.executor.wake((part,))
                self.asleep = tuple(each for each in self.asleep if each != part)

    @property
    def weight_version(self) -> str:
        """What the weights are called that steps compute with."""
        return self.scheduler.weight_version

    def load_weights(self, source: Any) -> Any:
        """Load other weights beside those in memory; see `Executor.load_weights`."""
        self.require_open()
        return self.executor.load_weights(source)

    def call_worker(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function gives that is called with the worker."""
        self.require_open()
        worker = getattr(self.executor, "worker", None)
        if worker is None:
            raise NotAvailableError("collective_rpc: there is no worker in this process")
        return function(worker, *args, **kwargs)

    def replace_weights(self, loaded: Any, version: str) -> None:
        """Compute with other weights, which the executor has loaded, from the next step on. What
        runs is computed again with them, up to its last token; nothing that was cached is found
        again. Raises CheckpointError, and goes on, for weights of another form. Where it is
        interrupted, weights are gone until `wake_up`.
        """
        self.require_open()
        before, key = self.asleep, self._digest_key
        with self._changing():
            self.loop.forget()
            self.rewind()
            self._digest_key = os.urandom(16)
            self.asleep = tuple(each for each in PARTS if each == WEIGHTS or each in before)
            try:
                self.executor.replace_weights(loaded)
            except QuireError:
                self.asleep, self._digest_key = before, key
                raise
            self.scheduler.rekey(self._digest_key, version)
            self.asleep = tuple(each for each in before if each != WEIGHTS)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the control plane. Ctrl-C meanwhile costs the requests."""
        was_torn, self.is_torn = self.is_torn, True
        try:
            yield
        except Exception:
            self.is_torn = was_torn
            raise
        except BaseException:
            self.interrupted()
            raise
        self.is_torn = was_torn

    def interrupted(self) -> None:
        """Begin with an empty control plane: Ctrl-C may have left this one half-way through. To be
        called again, by the next caller, where another one ends it."""
        self.is_torn = True
        self._end_interrupted()
        self.is_torn = False

    def _end_interrupted(self) -> None:
        self.start_over("interrupted")

    def advance(self) -> list[Progress]:
        """Go on until one step has been taken in. Never raises for a bug or a broken executor.

        An executor that fails costs the requests of that step; anything else that raises costs all
        of them.
        """
        with self._changing():
            try:
                return self.loop.advance(self)
            except Exception as error:
                message = "the engine failed outside of the executor and starts over"
                log_failure(logger, message, error)
                return self.start_over(f"the engine failed on this step: {type(error).__name__}")

    def settle(self) -> None:
        """Where no request is left, carry out what the last ones have ordered: of those who call
        only as long as there are requests."""
        if not self.has_work and not self.asleep and self.scheduler.admission.has_orders:
            self.advance()

    def idle(self) -> bool:
        """Make use of a moment without requests, for some milliseconds; whether there may be more
        to do. Never raises for a bug or a broken executor.
        """
        assert not self.has_work
        if self.asleep:
            return False
        if self.scheduler.flights or self.scheduler.admission.has_orders:
            self.advance()  # a step that was planned ahead for those who have ended, or orders
            return True
        try:
            if self._cost_file is not None:
                self._cost_file.save_if_due()
            return self.executor.idle()
        except Exception as error:
            log_failure(logger, "the engine failed while it was idle", error)
            return False

    # -- the verbs
    # ----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step, where none is in flight."""
        now = self._clock()
        return self._begun(self.scheduler.schedule(now), now)

    def schedule_ahead(self) -> StepPlan | None:
        """Decide the step after the one in flight; None where everyone has to wait for that one."""
        now = self._clock()
        plan = self.scheduler.schedule_ahead(now)
        return None if plan is None else self._begun(plan, now)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
        return self.executor.execute(plan)

    def launch(self, plan: StepPlan) -> Launched:
        """Begin to compute a step. Safe to call in another thread, one step at a time;
        so is the wait for what it gives."""
        return self.executor.launch(plan)

    def update(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Take in the oldest step in flight."""
        progress = self.scheduler.update(plan, result, self._clock())
        if self.recorder is not None:
            self.recorder.end(self._clock())
        return progress

    def abandon(self, plan: StepPlan, error: Exception) -> list[Progress]:
        """End the requests that a lost step concerns; it is unknown what the worker still holds,
        so all others start anew.

        These are the ones that wait for the companion that failed, if that is known; or else those
        of the step; of one without work, all that wait for a companion. One ends at least, or the
        same step would be lost for ever.
        """
        if isinstance(error, StepLostError):
            progress = list[Progress]()
            if error.costs_requests:
                progress = self._blame(plan, error)
            else:
                logger.error("step %d is computed again: %s", plan.step_id, error)
            self.rewind()
            self.scheduler.reset_prefix_cache()
            return progress
        progress = self._blame(plan, error)
        self.rewind()
        return progress

    def _blame(self, plan: StepPlan, error: Exception) -> list[Progress]:
        """End the requests that a lost step concerns."""
        cause = error.__cause__ or error
        log_failure(logger, f"the executor failed on step {plan.step_id}", cause)
        message = f"the engine failed on this step: {type(cause).__name__}"
        name = error.name if isinstance(error, CompanionError) else None
        waiting = [] if name is None and plan.work else self.scheduler.waiting_for(name)
        if waiting:
            return self.scheduler.fail_all(waiting, message)
        if plan.work:
            lost = tuple(WorkResult(error=message) for _ in plan.work)
            return self.update(plan, StepResult(plan.step_id, lost))
        return self.start_over(message)

    def rewind(self) -> None:
        """Forget the steps in flight and take everyone's blocks away, to be computed again."""
        self.scheduler.lose_flights()
        if self.recorder is not None:
            self.recorder.forget_open()

    def _begun(self, plan: StepPlan, now: float) -> StepPlan:
        if self.recorder is not None:
            self.recorder.begin(plan, now)
        return plan

    # -- for an output processor (`Ends`)
    # ---------------------------------------------------------------------------

    def stop(self, sequence: SequenceRecord, matched: str) -> None:
        """End a sequence whose text has reached a stop string."""
        assert isinstance(sequence, Sequence)
        self.scheduler.finish(sequence, FinishReason.STOP, matched)

    def fail(self, request_id: str, message: str) -> None:
        """End a request whose output cannot be made."""
        self.scheduler.fail(request_id, message)

    # -- failures
    # ----------------------------------------------------------------------------------------------

    def start_over(self, message: str) -> list[Progress]:
        """End every request and begin with an empty control plane: this one may be half-way through
        a change.

        The worker need not be told: a row begins anew with its next owner, and nothing in the new
        pool counts as cached. Returns the ends of all sequences that were lost: also of requests
        that the failed step has ended, untold.
        """
        self.loop.forget()
        in_flight = [
            sequence.request for flight in self.scheduler.flights for sequence in flight.sequences
        ]
        lost = dict.fromkeys([*self.scheduler.give_up(message), *in_flight])
        for request in lost:
            request.error = request.error or message
        stats, version = self.scheduler.stats, self.scheduler.weight_version
        self.scheduler = self._new_scheduler()
        self.scheduler.stats = stats
        self.scheduler.planner.weight_version = version
        if self.recorder is not None:
            self.record_steps()
        return [
            Progress(sequence, None, None) for request in lost for sequence in request.sequences
        ]

    def close(self) -> None:
        """End what computes, and free the memory. Idempotent."""
        if not self.has_work and self.scheduler.admission.has_orders and not self.asleep:
            self.advance()
        self.loop.close()
        self.executor.close()
        if self._cost_file is not None:
            self._cost_file.save()

    def _new_scheduler(self) -> Scheduler:
        prerequisites = [make() for make in self._prerequisites]
        return Scheduler(
            self._limits,
            prerequisites=prerequisites,
            digest_key=self._digest_key,
            pace=self._pace,
            look_ahead=None if self._look_ahead is None else self._look_ahead(),
        )


class Loop(Protocol):
    """An order of the verbs."""

    def advance(self, steps: StepLoop) -> list[Progress]:
        """Go on until one step has been taken in."""
        ...

    def forget(self) -> None:
        """Drop the outcomes of the steps in flight, once these are launched:
        the control plane knows them no more."""
        ...

    def close(self) -> None:
        """`forget`, and end what computes. Idempotent."""
        ...


class PlainLoop:
    """One verb after the other."""

    def advance(self, steps: StepLoop) -> list[Progress]:
        plan = steps.schedule()
        try:
            result = steps.execute(plan)
        except Exception as error:
            return steps.abandon(plan, error)
        return steps.update(plan, result)

    def forget(self) -> None:
        """Do nothing: no step is ever in flight between two calls."""

    def close(self) -> None:
        """Do nothing."""


class OverlappedLoop:
    """Plans a step, and takes in another, while one is computed: by a device,
    or by the thread that launches it."""

    def __init__(self, launcher: Launcher) -> None:
        self._in_flight: deque[StepPlan] = deque()
        self._launcher = launcher

    def advance(self, steps: StepLoop) -> list[Progress]:
        if not self._in_flight:
            self._begin(steps, steps.schedule())
        ahead = steps.schedule_ahead()
        if ahead is not None:
            self._begin(steps, ahead)
        try:
            result = self._launcher.collect()()
        except Exception as error:
            plan = self._in_flight.popleft()
            self.forget()
            return steps.abandon(plan, error)
        return steps.update(self._in_flight.popleft(), result)

    def forget(self) -> None:
        self._in_flight.clear()
        self._launcher.drain()

    def close(self) -> None:
        self.forget()
        self._launcher.close()

    def _begin(self, steps: StepLoop, plan: StepPlan) -> None:
        self._in_flight.append(plan)
        self._launcher.submit(steps.launch, plan)


def loop_of(plan: EnginePlan) -> Loop:
    """Return the order of the verbs that a plan has decided on."""
    if not plan.is_overlapped:
        return PlainLoop()
    return OverlappedLoop(StepThread() if plan.device == "cpu" else DirectLauncher())
