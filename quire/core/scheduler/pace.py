"""Steps bounded by time: how much of a prompt a step may compute, so that running streams do not
stop for long.

Owns the target and the model of step costs that it is held against. Chunk sizes change no result,
only when it is there.

A step computes its decodes in any case. Prompts get what they leave of the target, and at least

- a quarter of the target, however slow the decodes are;
- thirty times what a step takes whatever the chunk's length (reading the weights, and the keys and
  values before the chunk), up to two targets: shorter steps would spend more than three per cent of
  their time on it;
- while further prompts queue, twice the decodes' time and the time of the next prompt, up to two
  targets: those that queue wait for their first token, longer than the running ones wait for their
  next, and a server that admits fewer requests than arrive would never see its queue end;
- where nothing decodes, two targets: no stream can stop.

So a step takes at most its decodes' time and two targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.plan import RowWork
from quire.core.step_cost import StepCostModel, StepWork, work_of

CHUNK_QUANTUM = 16
"""Chunks that do not end a prompt are multiples of this, and no smaller:
kernels compute rows in tiles of 16."""
_LEAST_TARGETS, _MAX_TARGETS = 0.25, 2.0
_EFFICIENT_FIXED_PARTS = 30.0
"""A prompt of 3,500 tokens beside a stream, Qwen3-0.6B's configuration in bfloat16, two cores with
AVX512-BF16, against a fixed budget of 2,048 tokens: 9 per cent longer with 8 parts and 1.5 targets,
6 with 30 and 1.8, 4 to 6 with 30 and 2. What is left is the stream's own: its 24 tokens read the
output head 24 times, 13 ms each. The longest gap is 0.5 s, with that budget 5.7 s.
"""
_MEASURED_EVERY_S = 0.01
"""Where steps are not bounded: it takes tens of microseconds."""
_QUEUED_DECODES = 2.0
"""Requests of 128 tokens in and 64 out bring two tokens of prompts for each token that is decoded;
with less time for prompts the queue grows.
"""


class Forecast(NamedTuple):
    """A step's work, and the seconds that it is expected to take."""

    work: StepWork
    seconds: float


class StepPace:
    """A target for the duration of steps, and the model that predicts it.
    Lives as long as the engine."""

    def __init__(
        self, model: StepCostModel, target_s: float, *, quantum: int = CHUNK_QUANTUM
    ) -> None:
        assert target_s > 0.0 and quantum >= 1
        self.model = model
        self.is_bounding = math.isfinite(target_s)
        """Whether steps are bounded; else they are only measured."""
        self.target_s = target_s
        self.quantum = quantum
        self._last_end_s = -math.inf
        self._last_measured_s = -math.inf

    def prompt_s(self, decodes: Sequence[RowWork], queued_len: int, context_len: int = 0) -> float:
        """Return seconds of a step that prompts may take beside `decodes`.

        `queued_len` is the length of the prompt that waits for those that are being served, 0 where
        none does; `context_len` are the tokens computed so far of the one that is served first.
        """
        target_s, costs = self.target_s, self.model.units()
        fixed_s = costs.step_s + costs.head_s + costs.context_s * context_len
        if not decodes:
            return max(_MAX_TARGETS * target_s - fixed_s, _LEAST_TARGETS * target_s)
        decode_s = self.model.seconds(work_of(decodes))
        efficient_s = min(_EFFICIENT_FIXED_PARTS * fixed_s, _MAX_TARGETS * target_s)
        least_s = max(target_s - decode_s, _LEAST_TARGETS * target_s, efficient_s)
        if not queued_len:
            return least_s
        queued_s = max(_QUEUED_DECODES * decode_s, self.model.chunk_s(0, queued_len))
        return max(least_s, min(queued_s, _MAX_TARGETS * target_s))

    def forecast(self, work: Sequence[RowWork]) -> Forecast:
        """Return how long a step will take."""
        counted = work_of(work)
        return Forecast(counted, self.model.seconds(counted))

    @property
    def measures(self) -> bool:
        """Whether the next step is to be measured: each where steps are bounded, else some."""
        return self.is_bounding or self._last_end_s - self._last_measured_s >= _MEASURED_EVERY_S

    def pass_by(self, now: float) -> None:
        """A step that is not measured was taken in."""
        self._last_end_s = now

    def measure(self, forecast: Forecast, elapsed_s: float, now: float) -> float:
        """Learn from a step that was taken in at `now`, `elapsed_s` after it was launched; returns
        its duration.

        A step that was launched while the one before it ran began when that one ended.
        """
        measured_s = min(elapsed_s, now - self._last_end_s)
        self._last_end_s = self._last_measured_s = now
        self.model.observe(forecast.work, measured_s)
        return measured_s
