"""How many tokens a model drafts: as long as the next one is worth its forward pass.

A pass for the next tokens of all rows takes so many seconds, which are measured, and brings the sum
of the chances that everything drafted for a row is right. It is worth that where the chances per
second exceed the step's tokens per second without it:

    chances / pass > (rows + chances taken) / (duration of the step so far)

Chances are counted by how sure the model was. The first token is drafted for every row that has an
order: whether it pays to draft at all is the control plane's to measure.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.drafts import NUM_DEGREES

_LEAST_CHANCE = 0.05
"""A row whose drafts are all right with less is drafted no further."""
_RATE = 1 / 8
_PRIOR_WEIGHT, _MAX_COUNTS = 4.0, 256.0


class DraftDepth:
    """Measures, and decides. Results depend on none of it."""

    def __init__(self, *, is_adaptive: bool = True) -> None:
        """Not adaptive, it drafts as many as it may."""
        self._is_adaptive = is_adaptive
        self._trials, self._rights = [0.0] * NUM_DEGREES, [0.0] * NUM_DEGREES
        self._mean = 0.7
        """How often drafts are right that are judged."""
        self._step_s = self._pass_s = 0.0

    def learn(self, degree: int, is_right: bool) -> None:
        """A draft was judged: those before it were right."""
        self._trials[degree] += 1.0
        self._rights[degree] += is_right
        if self._trials[degree] > _MAX_COUNTS:
            self._trials[degree] /= 2.0
            self._rights[degree] /= 2.0
        self._mean += _RATE / 8 * (is_right - self._mean)

    def chance(self, degree: int) -> float:
        """The chance that a draft is right of which the model is so sure."""
        prior = (degree + 0.5) / NUM_DEGREES
        trials, rights = self._trials[degree], self._rights[degree]
        return (rights + prior * _PRIOR_WEIGHT) / (trials + _PRIOR_WEIGHT)

    def measured_step(self, seconds: float) -> None:
        """A step of the target took so long, without a prompt's tokens."""
        self._step_s += (_RATE if self._step_s else 1.0) * (seconds - self._step_s)

    def measured_pass(self, seconds: float) -> None:
        """A pass of the draft model for one token of each row took so long."""
        self._pass_s += (_RATE if self._pass_s else 1.0) * (seconds - self._pass_s)

    def going_on(
        self, num_rows: int, num_passes: int, taken: float, chances: Sequence[float]
    ) -> list[int]:
        """Return which of the rows get another token: `chances` that theirs are right so far,
        `taken` the sum of those of all tokens that were drafted."""
        if not self._is_adaptive:
            return list(range(len(chances)))
        places = [place for place, chance in enumerate(chances) if chance >= _LEAST_CHANCE]
        gain = self._mean * sum(chances[place] for place in places)
        seconds = self._step_s + num_passes * self._pass_s
        return places if gain * seconds > self._pass_s * (num_rows + taken) else []
