"""The speculator of engines for which none is configured."""

from __future__ import annotations

from quire.core.drafts import FORCED
from quire.core.speculation.speculator import Speculator
from quire.core.speculation.standing import StandingOrders
from quire.core.step_cost import StepCostModel

MAX_FORCED = 12
"""Tokens that a grammar is followed ahead: each takes a mask over the vocabulary, which is kept for
the step that samples there."""


def forced_speculator(costs: StepCostModel) -> Speculator:
    """A speculator that drafts only what grammars leave no choice of."""
    return Speculator(None, MAX_FORCED, costs=costs, forced=StandingOrders(FORCED, MAX_FORCED))
