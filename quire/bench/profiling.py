"""Where the time of steps goes, by wrapping the engine's own parts in stopwatches for the length of
a run.

Phases: the scheduler's two calls; the worker's forward pass, divided into the native kernels by
class and what is left of it; logits and sampling; what is left of the worker (applying the plan,
building inputs); and the making of outputs. The native kernels count their own time
(`quire.kernels.cpu.kernel_times`); where the reference kernels run, all of a forward pass is
"forward". Nothing is measured unless requested.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from quire.engine.loop.engine import Engine
from quire.engine.loop.step_loop import PlainLoop
from quire.kernels.cpu import kernel_times

FORWARD_KERNELS = ("linear", "attention", "elementwise")
PHASES = (
    "schedule",
    "inputs",
    *FORWARD_KERNELS,
    "forward",
    "logits",
    "sampling",
    "update",
    "outputs",
)
"""In the order of a step; together they are all of it.
"forward" is what the kernels leave of it."""
OUTER_PHASES = ("schedule", "inputs", "forward", "update", "outputs")
"""The phases in which no kernel runs: what the host costs.
(It has a small part of logits and sampling besides.)"""


class StepProfile:
    """Stopwatches on an engine; `seconds` by phase."""

    def __init__(self, engine: Engine) -> None:
        self._taken = dict.fromkeys((*PHASES, "execute", "step"), 0.0)
        engine.loop.close()
        engine.loop = PlainLoop()  # phases that overlap have no sum
        scheduler, worker = engine.scheduler, getattr(engine.executor, "worker", None)
        scheduler.schedule = self._timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
        scheduler.update = self._timed("update", scheduler.update)  # type: ignore[method-assign]
        engine.step = self._timed("step", engine.step)  # type: ignore[method-assign]
        engine.executor.execute = self._timed("execute", engine.executor.execute)  # type: ignore[method-assign]
        if worker is not None:
            worker.last_tokens = None  # nor have those that end unobserved
            worker.model = _Timed(
                worker.model,
                {
                    "forward": self._timed("forward", self._split(worker.model.forward)),
                    "logits": self._timed("logits", worker.model.logits),
                    "best_tokens": self._timed("logits", worker.model.best_tokens),
                    "drawn_tokens": self._timed("logits", worker.model.drawn_tokens),
                },
            )
            for outlet in worker.outlets:
                outlet.model = worker.model
                if hasattr(outlet, "sampler"):  # not every outlet draws tokens
                    outlet.sampler = _Timed(
                        outlet.sampler, {"sample": self._timed("sampling", outlet.sampler.sample)}
                    )

    def reset(self) -> None:
        """Forget what was measured so far (a warm-up)."""
        for phase in self._taken:
            self._taken[phase] = 0.0

    def seconds(self) -> dict[str, float]:
        """Return the time of each phase; together they are the time of all steps."""
        taken = self._taken
        inside = taken["forward"] + taken["logits"] + taken["sampling"]
        rest = taken["step"] - taken["schedule"] - taken["execute"] - taken["update"]
        kernels = sum(taken[kind] for kind in FORWARD_KERNELS)
        known = {
            "inputs": taken["execute"] - inside,
            "outputs": rest,
            "forward": taken["forward"] - kernels,
        }
        return {phase: known.get(phase, taken[phase]) for phase in PHASES}

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self._taken[phase] += time.perf_counter() - started

        return timed

    def _split(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward pass that notes what each class of kernels took of it."""

        def split(*arguments: Any, **keywords: Any) -> Any:
            before = kernel_times()
            try:
                return forward(*arguments, **keywords)
            finally:
                after = kernel_times()
                for kind in FORWARD_KERNELS:
                    self._taken[kind] += after.get(kind, 0.0) - before.get(kind, 0.0)

        return split


class _Timed:
    """An object with some of its methods replaced; all else is the object's own."""

    def __init__(self, inner: object, methods: dict[str, Callable[..., Any]]) -> None:
        self._inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
