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
    """To load an adapter, or, without a folder, to forget it: no row uses it then."""

    digest: str
    folder: str | None


class AdapterVerdict(NamedTuple):
    """The outcome of loading an adapter: it is ready, or `error` says why it never will be."""

    digest: str
    error: str | None = None
