"""The grammars of an executor's rows: each row's matcher, and the table that they begin from. What is held only saves work."""

from __future__ import annotations

from collections import OrderedDict

from quire.core.plan import RowSampling
from quire.grammar.matcher import Matcher
from quire.grammar.table import GrammarTable

MAX_MATCHERS = 4096
"""Rows whose states are kept; more than any batch holds, and rows that end are forgotten by the worker."""


class RowMatchers:
    """Matchers, found by the `RowSampling` object that a row keeps for life."""

    def __init__(self, grammars: GrammarTable | None = None) -> None:
        self.grammars = GrammarTable() if grammars is None else grammars
        self._matchers: OrderedDict[int, tuple[RowSampling, Matcher]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._matchers)

    def of(self, sampling: RowSampling) -> Matcher:
        """The row's matcher. Raises RequestError where its grammar cannot be compiled."""
        key = id(sampling)
        found = self._matchers.get(key)
        if found is None or found[0] is not sampling:
            assert sampling.grammar is not None
            found = self._matchers[key] = (sampling, self.grammars.begin(sampling.grammar))
            if len(self._matchers) > MAX_MATCHERS:
                self._matchers.popitem(last=False)
        return found[1]

    def forget(self, sampling: RowSampling) -> None:
        """The row has ended or lost its place."""
        self._matchers.pop(id(sampling), None)
