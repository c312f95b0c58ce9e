"""How a step's three verbs follow each other: one after the other, or with the next step planned while one runs.

    plain       schedule 1, execute 1, update 1, schedule 2, execute 2, update 2, ...
    overlapped  schedule 1, schedule 2, await 1, update 1, schedule 3, await 2, update 2, ...  while 1, 2, 3 are launched

A device that computes beside the host has the next step launched behind the one that it is busy with, where it is planned:
a thread would only contend for the interpreter. Where the host itself computes, a thread does it. Who launches never asks what
came of a step, only who takes it in does.

Both give the same tokens: the overlapped loop counts on what the step in flight will have computed, never on which tokens come
of it. It takes in each outcome while the next step runs, so whoever ends has had a step too many, whose outcome is dropped, and
who comes waits for a step more. Owns the order of the verbs and that thread; what a failure means is said in `StepLoop`.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.core.plan import StepPlan, StepResult
from quire.core.scheduler.scheduler import Progress
from quire.engine.planning import EnginePlan
from quire.errors import EngineError
from quire.executor.interface import Launched

_LOOK_S = 1.0
"""So often a waiting loop looks whether the thread that computes is still there."""
_CLOSE_S = 60.0
"""A step on its way is given so long to end when an engine is closed."""


class Control(Protocol):
    """The verbs, with what belongs to them: clocks, records, failures."""

    def schedule(self) -> StepPlan:
        """The next step, where none is in flight."""
        ...

    def schedule_ahead(self) -> StepPlan | None:
        """The step after the one in flight; None where everyone has to wait for that one."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
        ...

    def launch(self, plan: StepPlan) -> Launched:
        """Begin to compute a step. Safe to call in another thread, one step at a time; so is the wait for what it gives."""
        ...

    def update(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Take in the oldest step in flight."""
        ...

    def abandon(self, plan: StepPlan, error: Exception) -> list[Progress]:
        """The oldest step in flight was lost, and with it the worker's state."""
        ...


class Loop(Protocol):
    """An order of the verbs."""

    def advance(self, control: Control) -> list[Progress]:
        """Go on until one step has been taken in."""
        ...

    def forget(self) -> None:
        """Drop the outcomes of the steps in flight, once these are launched: the control plane knows them no more."""
        ...

    def close(self) -> None:
        """`forget`, and end what computes. Idempotent."""
        ...


class PlainLoop:
    """One verb after the other."""

    def advance(self, control: Control) -> list[Progress]:
        plan = control.schedule()
        try:
            result = control.execute(plan)
        except Exception as error:
            return control.abandon(plan, error)
        return control.update(plan, result)

    def forget(self) -> None:
        """Nothing is ever in flight between two calls."""

    def close(self) -> None:
        """Nothing to end."""


class Launcher(Protocol):
    """Launches steps in the order in which they are given to it."""

    def submit(self, launch: Callable[[StepPlan], Launched], plan: StepPlan) -> None:
        """Have a plan launched, after those given before."""
        ...

    def collect(self) -> Launched:
        """The oldest step that was not collected, once it is launched; raises what that raised."""
        ...

    def drain(self) -> None:
        """Drop what was not collected, once all of it is launched."""
        ...

    def close(self) -> None:
        """Launch nothing more. Idempotent."""
        ...


class OverlappedLoop:
    """Plans a step, and takes in another, while one is computed: by a device, or by the thread that launches it."""

    def __init__(self, launcher: Launcher) -> None:
        self._in_flight: deque[StepPlan] = deque()
        self._launcher = launcher

    def advance(self, control: Control) -> list[Progress]:
        if not self._in_flight:
            self._begin(control, control.schedule())
        ahead = control.schedule_ahead()
        if ahead is not None:
            self._begin(control, ahead)
        try:
            result = self._launcher.collect()()
        except Exception as error:
            plan = self._in_flight.popleft()
            self.forget()
            return control.abandon(plan, error)
        return control.update(self._in_flight.popleft(), result)

    def forget(self) -> None:
        self._in_flight.clear()
        self._launcher.drain()

    def close(self) -> None:
        self.forget()
        self._launcher.close()

    def _begin(self, control: Control, plan: StepPlan) -> None:
        self._in_flight.append(plan)
        self._launcher.submit(control.launch, plan)


def loop_of(plan: EnginePlan) -> Loop:
    """The order of the verbs that a plan has decided on."""
    if not plan.is_overlapped:
        return PlainLoop()
    return OverlappedLoop(StepThread() if plan.device == "cpu" else DirectLauncher())


_Outcome = Launched | BaseException
_Item = tuple[Callable[[StepPlan], Launched], StepPlan] | None


class DirectLauncher:
    """A `Launcher` for devices that compute beside the host: a step is launched when it is given."""

    def __init__(self) -> None:
        self._done: deque[_Outcome] = deque()

    def submit(self, launch: Callable[[StepPlan], Launched], plan: StepPlan) -> None:
        try:
            self._done.append(launch(plan))
        except Exception as error:  # told when the step is collected, as those before it come first
            self._done.append(error)

    def collect(self) -> Launched:
        return _launched(self._done.popleft())

    def drain(self) -> None:
        self._done.clear()

    def close(self) -> None:
        self.drain()


def _launched(outcome: _Outcome) -> Launched:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class StepThread:
    """A `Launcher` for steps that are computed where they are launched: in a thread. Begun by the first."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, launch: Callable[[StepPlan], Launched], plan: StepPlan) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-steps", daemon=True)
            self._thread.start()
        self._todo.put((launch, plan))

    def collect(self) -> Launched:
        return _launched(self._next())

    def drain(self) -> None:
        """Counts on nothing: a wait may have been interrupted anywhere."""
        if self._thread is None:
            return

        def marker() -> StepResult:
            return StepResult(-1)

        self._todo.put((lambda plan: marker, StepPlan(-1)))
        while self._thread is not None and self._next() is not marker:
            pass

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._todo.put(None)
            thread.join(_CLOSE_S)

    def _next(self) -> _Outcome:
        while True:
            try:
                return self._done.get(timeout=_LOOK_S)
            except queue.Empty:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = None
                    return EngineError("the thread that computes steps has died")

    def _run(self) -> None:
        while self._launch(self._todo.get()):
            pass

    def _launch(self, item: _Item) -> bool:
        """Launch one step; False at the end. A call of its own, so that an idle thread holds on to no engine."""
        if item is None:
            return False
        launch, plan = item
        try:
            self._done.put(launch(plan))
        except BaseException as error:  # whoever waits for the step must hear of it
            self._done.put(error)
        return True
