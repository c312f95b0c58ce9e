"""Who launches the steps of an overlapped loop: the thread that plans them, or one of its own.

A device that computes beside the host has the next step launched behind the one that it is busy
with, where it is planned:
a thread would only contend for the interpreter. Where the host itself computes, a thread does it.
Who launches never asks what came of a step, only who takes it in does. Behind a step that could not
be launched none is, until that is known: they count on it, and on what the worker held for it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.common.threads import close_at_exit
from quire.core.plan import StepPlan, StepResult
from quire.errors import EngineError
from quire.executor.interface import Launched

_LOOK_S = 1.0
"""So often a waiting loop looks whether the thread that computes is still there."""
_CLOSE_S = 60.0
"""A step on its way is given so long to end when an engine is closed."""


class Launcher(Protocol):
    """Launches steps in the order in which they are given to it."""

    def submit(self, launch: Callable[[StepPlan], Launched], plan: StepPlan) -> None:
        """Have a plan launched, after those given before."""
        ...

    def collect(self) -> Launched:
        """Return the oldest step that was not collected, once it is launched; raises what that
        raised."""
        ...

    def drain(self) -> None:
        """Drop what was not collected, once all of it is launched."""
        ...

    def close(self) -> None:
        """Launch nothing more. Idempotent."""
        ...


_Outcome = Launched | BaseException
_Item = tuple[Callable[[StepPlan], Launched], StepPlan] | None
_MARKED = StepPlan(-1)
"""Behind what is drained."""


class DirectLauncher:
    """A `Launcher` for devices that compute beside the host:
    a step is launched when it is given."""

    def __init__(self) -> None:
        self._done: deque[_Outcome] = deque()

    def submit(self, launch: Callable[[StepPlan], Launched], plan: StepPlan) -> None:
        if self._done and isinstance(self._done[-1], BaseException):
            self._done.append(self._done[-1])
            return
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
    """A `Launcher` for steps that are computed where they are launched: in a thread.
    Begun by the first."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        """What a launch has raised, until it is drained. The thread's own."""

    def submit(self, launch: Callable[[StepPlan], Launched], plan: StepPlan) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-steps", daemon=True)
            self._thread.start()
            close_at_exit(self)
        self._todo.put((launch, plan))

    def collect(self) -> Launched:
        return _launched(self._next())

    def drain(self) -> None:
        """Counts on nothing: a wait may have been interrupted anywhere."""
        if self._thread is None:
            return

        def marker() -> StepResult:
            return StepResult(-1)

        def mark(plan: StepPlan) -> Launched:
            return marker

        self._todo.put((mark, _MARKED))
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
        """Launch one step; False at the end. A call of its own,
        so that an idle thread holds on to no engine."""
        if item is None:
            return False
        launch, plan = item
        if plan is _MARKED:
            self._failure = None
        if self._failure is not None:
            self._done.put(self._failure)
            return True
        try:
            self._done.put(launch(plan))
        except BaseException as error:  # the thread that waits for the step must hear of it
            self._failure = error
            self._done.put(error)
        return True
