"""Steps bounded by time: how much of a prompt a step may compute, so that running streams do not stop for long.

Owns the target and the model of step costs that it is held against. Chunk sizes change no result, only when it is there.

A step computes its decodes in any case. Prompts get what they leave of the target, and at least a quarter of it. While further
prompts queue, these get a whole target, or two where two or more queue: all of them wait for their first token, longer than
the running ones wait for their next, and a server that admits fewer requests than arrive would never see its queue end. Where
nothing decodes, no stream can stop, and prompts get two targets as well. So a step takes at most its decodes' time and two
targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.plan import RowWork
from quire.core.step_cost import StepCostModel, StepWork, work_of

CHUNK_QUANTUM = 16
"""Chunks that do not end a prompt are multiples of this, and no smaller: kernels compute rows in tiles of 16."""
_LEAST_SHARE = 0.25
_MAX_TARGETS = 2.0


class Forecast(NamedTuple):
    """A step's work, and the seconds that it is expected to take."""

    work: StepWork
    seconds: float


class StepPace:
    """A target for the duration of steps, and the model that predicts it. Lives as long as the engine."""

    def __init__(self, model: StepCostModel, target_s: float, *, quantum: int = CHUNK_QUANTUM) -> None:
        assert target_s > 0.0 and quantum >= 1
        self.model = model
        self.target_s = target_s
        self.quantum = quantum
        self._last_end_s = -math.inf

    def prompt_s(self, decodes: Sequence[RowWork], num_queued: int) -> float:
        """Seconds of a step that prompts may take beside `decodes`, with so many more of them waiting."""
        least_s = _LEAST_SHARE * self.target_s
        if not decodes:
            return max(_MAX_TARGETS * self.target_s - self.model.units().step_s, least_s)
        left_s = max(self.target_s - self.model.seconds(work_of(decodes)), least_s)
        return max(left_s, min(_MAX_TARGETS, num_queued) * self.target_s)

    def forecast(self, work: Sequence[RowWork]) -> Forecast:
        """How long a step will take."""
        counted = work_of(work)
        return Forecast(counted, self.model.seconds(counted))

    def measure(self, forecast: Forecast, elapsed_s: float, now: float) -> float:
        """Learn from a step that was taken in at `now`, `elapsed_s` after it was launched; returns its duration.

        A step that was launched while the one before it ran began when that one ended.
        """
        measured_s = min(elapsed_s, now - self._last_end_s)
        self._last_end_s = now
        self.model.observe(forecast.work, measured_s)
        return measured_s
