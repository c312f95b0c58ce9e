"""Adapters as both planes know them: what a row's is, and what is said of loading it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.content import Content

ADAPTERS = "adapters"
"""Of `StepPlan.orders`: each an `AdapterOrder`. Of `StepResult.news`: an `AdapterVerdict` on each
that loads one, in any later step."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Adapter:
    """One version of a low-rank adapter. A name may come to mean another one; this never does."""

    digest: str
    """Of its files' content, in hexadecimal digits: two adapters of one digest are the same."""
    folder: str
    """Where its files lie, and stay as they are, for as long as this record is held."""
    invocation: tuple[int, ...] = ()
    """Of an activated one (aLoRA, Greenewald et al. 2025): the tokens from which on it is used, at
    their last place in a prompt. What stands before is computed by the model alone. Empty: it is
    used for all tokens."""

    def start_in(self, token_ids: Sequence[int]) -> int | None:
        """Return the position from which on it is used in a prompt; None where it is invoked
        nowhere. O(prompt)."""
        count = len(self.invocation)
        first = self.invocation[0] if count else 0
        for place in range(len(token_ids) - count, -1, -1) if count else ():
            if token_ids[place] == first and (
                tuple(token_ids[place : place + count]) == self.invocation
            ):
                return place
        return None if count else 0

    def content_at(self, start: int, content_id: int) -> Content:
        """Return what stands at the position from which on it is used, in place of `content_id`, so
        that nothing computed with it is ever found for the model alone or another adapter."""
        told = f"{self.digest} {content_id}".encode()
        return Content(start, start + 1, hashlib.blake2b(told, digest_size=32).digest())


class AdapterOrder(NamedTuple):
    """To load an adapter; without a folder, to forget it, loaded or not: no row uses it then."""

    digest: str
    folder: str | None
    number: int = 0
    """Of an order to load: which one a verdict is on."""


FORGET_ALL = AdapterOrder("", None)
"""To forget every adapter and order: what was ordered before may have been lost on either side."""


class AdapterVerdict(NamedTuple):
    """The outcome of an order to load an adapter: it is ready, or `error` says why it is not."""

    digest: str
    error: str | None = None
    number: int = 0
