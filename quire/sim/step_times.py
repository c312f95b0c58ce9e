"""What a simulated step takes: the linear model of its work, bent by the number of its tokens.

Kernels compute rows in tiles and read the weights once whatever the number of rows, so a step of 8
tokens may take what one of 14 does, and one of 32 more than twice as much. A server's own model
does without, since it decides between steps of hundreds of tokens; a simulation adds up thousands
of short ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from quire.core.step_cost import StepWork, UnitCosts

Curve = Sequence[tuple[int, float]]
"""Numbers of tokens, ascending, and how many times as long as the linear model says their steps
take. Between two of them, and the logarithms of their numbers, it is a line."""


class StepTimes:
    """Durations of steps."""

    def __init__(self, costs: UnitCosts, curve: Curve = ()) -> None:
        assert all(one < other for (one, _), (other, _) in pairwise(curve)), curve
        self._costs = costs
        self._places = [math.log2(num_tokens) for num_tokens, _ in curve]
        self._ratios = [ratio for _, ratio in curve]

    def seconds(self, work: StepWork) -> float:
        """Return how long a step takes."""
        linear_s = sum(cost_s * amount for cost_s, amount in zip(self._costs, work, strict=True))
        return linear_s * self.ratio(work.num_tokens)

    def ratio(self, num_tokens: int) -> float:
        """Return the factor for steps of so many tokens."""
        places, ratios = self._places, self._ratios
        if not places:
            return 1.0
        place = math.log2(max(1, num_tokens))
        above = bisect_right(places, place)
        if above in (0, len(places)):
            return ratios[max(0, above - 1)]
        share = (place - places[above - 1]) / (places[above] - places[above - 1])
        return ratios[above - 1] + share * (ratios[above] - ratios[above - 1])
