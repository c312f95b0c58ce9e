"""Drafters: who draft tokens the tokens that come next.

A draft costs time where it is wrong, and changes no result: the model's own choice decides. A
drafter here knows tokens alone and works in the control plane, in amortised constant time a token.
One that needs a model works in the worker, and its half here only takes the draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple, Protocol

from quire.core.request import Sequence


class Draft(NamedTuple):
    """Tokens that may come next."""

    token_ids: Tokens[int] = ()
    strength: int = 0
    """How much speaks for the first of them, such as the length of a match; one more for each that
    follows. What a strength is worth is measured."""
    strengths: Tokens[int] = ()
    """Of each token, where it is not one more than that of the token before."""

    def strength_of(self, place: int) -> int:
        """How much speaks for one of the tokens, given those before it."""
        return self.strengths[place] if self.strengths else self.strength + place


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Draft tokens for many sequences."""

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """Draft up to `most` of the tokens that follow the sequence's known ones.

        Called for a sequence when it has gained tokens, not necessarily at each of them.
        """
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; it need not be known here."""
        ...
