"""How long a step takes: a linear model of its work, corrected by every measured step.

Owns the coefficients and their uncertainty. Knows no clock: durations are passed in. The
coefficients start from an estimate (`UnitCosts`, made of the model's sizes and the processor's
class) and are then tracked by a Kalman filter, whose state is the ratio of each true coefficient to
its estimate (Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960). Ratios
share part of their prior variance, since a processor that is slower than estimated is slower at
everything; and they may drift, since other programs come and go. A step that was interrupted for a
moment moves the model little: deviations beyond three standard deviations count as three (Huber's
rule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from quire.core.plan import RowWork

_COMMON_VARIANCE = 0.5
"""Of the ratios, shared by all: the speed of the whole processor is known
within a factor of two or so."""
_OWN_VARIANCE = 0.25
"""Of each ratio beyond that."""
_DRIFT_VARIANCE = 1e-4
"""By which each ratio may change from one step to the next: one per cent."""
_NOISE = 0.1
"""Standard deviation of a step's duration, relative to the prediction:
the host of the measurements was shared, too."""
_SAVED_VARIANCE_SHARE = 0.1
"""What is left of the prior's variance where an earlier run's ratios are taken over."""
_MAX_RATIO = 50.0
"""No ratio leaves 1/50 to 50: an estimate that is further off is a mistake, not a slow machine."""
_MAX_DEVIATIONS = 3.0

_start_of, _num_tokens_of = itemgetter(1), itemgetter(2)


class StepWork(NamedTuple):
    """What a step's duration depends on. One entry for each coefficient of `UnitCosts`."""

    num_steps: int = 0
    """1 for a step that computes anything."""
    num_heads: int = 0
    """1 for a step that has tasks: it reads the output head's weights."""
    num_tokens: int = 0
    num_outputs: int = 0
    """Rows that have tasks, and tokens that they verify."""
    num_context: int = 0
    """Tokens whose keys and values are read, once for each row."""
    num_pairs: float = 0.0
    """Pairs of a query and a key: a row of n tokens from position s has n * (s + n / 2)."""


NUM_COSTS = len(StepWork._fields)


def work_of(work: Sequence[RowWork]) -> StepWork:
    """Count a step's work: O(rows)."""
    num_rows = len(work)
    if not num_rows:
        return StepWork()
    num_tokens = sum(map(_num_tokens_of, work))
    if num_tokens == num_rows:  # decodes: the common case, with hundreds of rows
        num_context = sum(map(_start_of, work)) + num_rows
        return StepWork(1, 1, num_tokens, num_rows, num_context, float(num_context))
    num_outputs, num_context, num_pairs = 0, 0, 0.0
    for item in work:
        num_outputs += bool(item.tasks) + item.num_ahead
        num_context += item.start + item.num_tokens
        num_pairs += item.num_tokens * (item.start + 0.5 * item.num_tokens)
    return StepWork(1, num_outputs > 0, num_tokens, num_outputs, num_context, num_pairs)


class UnitCosts(NamedTuple):
    """Seconds for one unit of each kind of `StepWork`, estimated before anything was measured;
    all above 0."""

    step_s: float
    head_s: float
    token_s: float
    output_s: float
    context_s: float
    pair_s: float


class StepCostModel:
    """Predicts durations of steps, and learns from measured ones."""

    def __init__(self, estimate: UnitCosts) -> None:
        assert all(math.isfinite(unit_s) and unit_s > 0.0 for unit_s in estimate), estimate
        self.estimate = estimate
        self.num_observed = 0
        self._units: list[float] = list(estimate)
        self._ratios = [1.0] * NUM_COSTS
        self._covariance = _prior(1.0)
        self._limits = [_COMMON_VARIANCE + _OWN_VARIANCE] * NUM_COSTS

    def seconds(self, work: StepWork) -> float:
        """Return the predicted duration of a step."""
        return sum(map(_product, self._units, work))

    def chunk_len(self, seconds: float, start: int, most: int) -> int:
        """Return how many tokens of one sequence from position `start` on take up to `seconds`
        more; at most `most`, at least 0.

        Solves token * n + context * (start + n) + pair * n * (start + n / 2) = seconds for n.
        """
        _, _, token_s, _, context_s, pair_s = self._units
        left_s = seconds - context_s * start
        if left_s <= 0.0:
            return 0
        slope_s = token_s + context_s + pair_s * start
        # The root of pair / 2 * n^2 + slope * n - left, in the form that does not cancel where pair
        # is small.
        length = 2.0 * left_s / (slope_s + math.sqrt(slope_s * slope_s + 2.0 * pair_s * left_s))
        return min(most, int(length))

    def chunk_s(self, start: int, count: int) -> float:
        """Return what such a chunk adds to a step's duration."""
        _, _, token_s, _, context_s, pair_s = self._units
        return (
            token_s * count + context_s * (start + count) + pair_s * count * (start + 0.5 * count)
        )

    def observe(self, work: StepWork, measured_s: float) -> None:
        """Learn from a step that took `measured_s`."""
        predicted_s = self.seconds(work)
        if not (work.num_steps and 0.0 < measured_s < math.inf):
            return
        gradient = [
            unit_s * amount / predicted_s
            for unit_s, amount in zip(self.estimate, work, strict=True)
        ]
        covariance = self._covariance
        spread = [sum(map(_product, row, gradient)) for row in covariance]
        variance = sum(map(_product, spread, gradient)) + _NOISE * _NOISE
        most = _MAX_DEVIATIONS * math.sqrt(variance)
        deviation = max(-most, min(most, measured_s / predicted_s - 1.0))
        for place, each in enumerate(spread):
            gain = each / variance
            ratio = self._ratios[place] + gain * deviation
            self._ratios[place] = max(1.0 / _MAX_RATIO, min(_MAX_RATIO, ratio))
            row = covariance[place]
            for other in range(NUM_COSTS):
                row[other] -= gain * spread[other]
            row[place] = min(row[place] + _DRIFT_VARIANCE, self._limits[place])
        self._units = list(map(_product, self.estimate, self._ratios))
        self.num_observed += 1

    def units(self) -> UnitCosts:
        """Return the coefficients as they are known now."""
        return UnitCosts(*self._units)

    def saved(self) -> dict[str, object]:
        """Return what a later run can begin with: plain numbers."""
        return {
            "estimate": list(self.estimate),
            "ratios": list(self._ratios),
            "num_observed": self.num_observed,
        }

    def restore(self, saved: Mapping[str, object]) -> bool:
        """Begin with what an earlier run learned; False, changing nothing, where that is of another
        model or no such record.

        Before the first step is observed.
        """
        ratios, estimate = saved.get("ratios"), saved.get("estimate")
        if (
            estimate != list(self.estimate)
            or not isinstance(ratios, list)
            or len(ratios) != NUM_COSTS
        ):
            return False
        if not all(
            isinstance(ratio, float) and 1.0 / _MAX_RATIO <= ratio <= _MAX_RATIO for ratio in ratios
        ):
            return False
        self._ratios = list(ratios)
        self._units = list(map(_product, self.estimate, self._ratios))
        self._covariance = _prior(_SAVED_VARIANCE_SHARE)
        return True


def _product(a: float, b: float) -> float:
    return a * b


def _prior(share: float) -> list[list[float]]:
    return [
        [
            share * (_COMMON_VARIANCE + _OWN_VARIANCE * (row == column))
            for column in range(NUM_COSTS)
        ]
        for row in range(NUM_COSTS)
    ]


def block_costs(model: StepCostModel, block_size: int, max_len: int) -> Callable[[int], float]:
    """Return the function that tells the seconds to compute a block with so many before it in its
    sequence. No sequence has more than `max_len` tokens, whatever a damaged file says."""
    last = max(0, max_len // block_size - 1)

    def cost_s(place: int) -> float:
        return model.chunk_s(min(place, last) * block_size, block_size)

    return cost_s
