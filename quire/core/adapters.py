"""Adapters as both planes know them: what a row's is, and what is said of loading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
