"""Where the time of steps goes, by wrapping the engine's own parts in stopwatches for the length of a run.

Phases: the scheduler's two calls, the worker's forward pass, logits and sampling, what is left of the worker (applying the
plan, building inputs), and the making of outputs. Nothing is measured unless asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from quire.engine.engine import Engine

PHASES = ("schedule", "inputs", "forward", "logits", "sampling", "update", "outputs")


class StepProfile:
    """Stopwatches on an engine; `seconds` by phase."""

    def __init__(self, engine: Engine) -> None:
        self._taken = dict.fromkeys((*PHASES, "execute", "step"), 0.0)
        scheduler, worker = engine.scheduler, getattr(engine.executor, "worker", None)
        scheduler.schedule = self._timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
        scheduler.update = self._timed("update", scheduler.update)  # type: ignore[method-assign]
        engine.step = self._timed("step", engine.step)  # type: ignore[method-assign]
        engine.executor.execute = self._timed("execute", engine.executor.execute)  # type: ignore[method-assign]
        if worker is not None:
            worker.model = _Timed(
                worker.model,
                {
                    "forward": self._timed("forward", worker.model.forward),
                    "logits": self._timed("logits", worker.model.logits),
                },
            )
            worker.sampler = _Timed(worker.sampler, {"sample": self._timed("sampling", worker.sampler.sample)})

    def reset(self) -> None:
        """Forget what was measured so far (a warm-up)."""
        for phase in self._taken:
            self._taken[phase] = 0.0

    def seconds(self) -> dict[str, float]:
        """Time of each phase; together they are the time of all steps."""
        taken = self._taken
        inside = taken["forward"] + taken["logits"] + taken["sampling"]
        rest = taken["step"] - taken["schedule"] - taken["execute"] - taken["update"]
        known = {"inputs": taken["execute"] - inside, "outputs": rest}
        return {phase: known.get(phase, taken[phase]) for phase in PHASES}

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self._taken[phase] += time.perf_counter() - started

        return timed


class _Timed:
    """An object with some of its methods replaced; all else is the object's own."""

    def __init__(self, inner: object, methods: dict[str, Callable[..., Any]]) -> None:
        self._inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
