"""Driving an engine in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine

MAX_STEPS = 5000


def run_all(
    engine: Engine, after_step: Callable[[], None] = lambda: None
) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of every sampling request, by id."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            outputs[output.request_id] = output
        if engine.has_work:
            after_step()
    raise AssertionError(f"still busy after {MAX_STEPS} steps")


def hold_after(engine: Engine, num_steps: int) -> None:
    """From now on the engine makes so many steps and then no other, however much there is to do."""
    make_step, left = engine.step, num_steps

    def step() -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return make_step()
        time.sleep(0.002)
        return []

    engine.step = step  # type: ignore[method-assign]
