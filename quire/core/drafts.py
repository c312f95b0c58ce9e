"""Draft tokens that the worker makes: what the control plane orders, and what it is told."""

from __future__ import annotations

from typing import NamedTuple

FORCED = "forced tokens"
"""Of `StepPlan.orders`: each a `DraftOrder` on tokens that the row's grammar leaves no choice of.
Of `StepResult.news`: the `Drafted` that came of the step."""


class DraftOrder(NamedTuple):
    """From now on, draft what follows each token that is sampled for a row; until the row is
    given to another sequence."""

    row: int
    most: int
    """Tokens at a time; 0 ends it."""


class Drafted(NamedTuple):
    """What may follow a row's first `num_tokens` tokens."""

    row: int
    num_tokens: int
    token_ids: tuple[int, ...]
    strengths: tuple[int, ...]
    """How much speaks for each, given those before it: one of the following."""
    seconds: float = 0.0
    """What drafting took after the step, in which a draft is made whether it is used or not: of all
    rows, said with the first."""
    read_s: float = 0.0
    """Of that, what it took to catch up with tokens that had been known before, likewise said with
    the first; `num_read` is how many these were."""
    num_read: int = 0


MODELLED = "modelled tokens"
"""The same of what a draft model would sample. Of `StepPlan.orders`: each a `DraftOrder`."""
NUM_DEGREES = 8
"""Of a draft model's confidence, from 0 to 1 in equal parts; by each, another strength."""


def strength_of_degree(degree: int) -> int:
    """How much speaks for a token of a draft model, by how sure it is."""
    return 1 << (degree - 1) if degree else 0


LONGEST, HABIT, ONLY = 1 << 7, 1 << 8, 1 << 9
"""All other tokens that a grammar allows are beginnings of it; it was chosen last among the same
ones; there is no other. More than any match of texts is long."""
