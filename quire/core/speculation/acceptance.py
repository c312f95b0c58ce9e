"""How often draft tokens are right: counted by strength, for each sequence and for all.

Old counts fade, so that the chance follows a text that changes. A sequence's own counts weigh more
with each of them; before, it is expected to be as all others are.
"""

from __future__ import annotations

NUM_BINS = 11
_PRIOR_CHANCES, _PRIOR_WEIGHT = (0.1, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.6, 0.8, 0.98), 4.0
"""By strength, before anything was counted: what copies of text reach, roughly; the last three for
tokens that a grammar leaves little choice of (`quire.core.drafts`)."""
_OWN_WEIGHT = 4.0
"""Draft tokens of its own after which a sequence counts as much as what is known of all."""
_MAX_OWN, _MAX_SHARED = 32.0, 512.0
"""Counts beyond these are halved."""


def bin_of(strength: int) -> int:
    """Strengths 0, 1, 2 to 3, 4 to 7 and so on."""
    return min(strength.bit_length(), NUM_BINS - 1)


class Acceptance:
    """Counts of draft tokens, and of those that were right, by strength."""

    __slots__ = ("_limit", "_parent", "_rights", "_trials")

    def __init__(self, parent: Acceptance | None = None) -> None:
        self._parent = parent
        self._limit = _MAX_SHARED if parent is None else _MAX_OWN
        self._trials, self._rights = [0.0] * NUM_BINS, [0.0] * NUM_BINS

    def count(self, strength: int, is_right: bool) -> None:
        """Count a draft, here and in what all sequences share."""
        place = bin_of(strength)
        self._trials[place] += 1.0
        self._rights[place] += is_right
        if self._trials[place] > self._limit:
            self._trials[place] /= 2.0
            self._rights[place] /= 2.0
        if self._parent is not None:
            self._parent.count(strength, is_right)

    def chance(self, strength: int) -> float:
        """The chance that a draft is right, where those before it are; above 0 and below 1."""
        place = bin_of(strength)
        if self._parent is None:
            prior, weight = _PRIOR_CHANCES[place], _PRIOR_WEIGHT
        else:
            prior, weight = self._parent.chance(strength), _OWN_WEIGHT
        return (self._rights[place] + prior * weight) / (self._trials[place] + weight)
