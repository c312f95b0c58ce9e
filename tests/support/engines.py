"""Driving an engine in tests."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput

MAX_STEPS = 5000


def run_all(engine: Engine, after_step: Callable[[], None] = lambda: None) -> dict[str, RequestOutput]:
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
