"""Grammars as a companion of the worker: each row's matcher, and the table they begin from.
All of it only saves work."""

from __future__ import annotations

from quire.core.grammars import GRAMMARS, Grammar
from quire.core.plan import Record, RowSampling, StepPlan
from quire.grammar.matcher import Matcher
from quire.grammar.table import GrammarTable


class RowMatchers:
    """Implements `Companion`: compiles what is ordered,
    and keeps a matcher for each row that has a grammar."""

    name = GRAMMARS

    def __init__(self, grammars: GrammarTable | None = None) -> None:
        self._grammars = GrammarTable() if grammars is None else grammars
        self._matchers: dict[int, tuple[RowSampling, Matcher]] = {}
        """By row, with the object that tells its present owner from the one before:
        a sequence keeps one for life."""

    def __len__(self) -> int:
        return len(self._matchers)

    def begin(self, plan: StepPlan) -> None:
        for row in plan.removed_rows:
            self._matchers.pop(row, None)
        self._grammars.ask([Grammar._make(order) for order in plan.orders.get(GRAMMARS, ())])

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        return self._grammars.take_verdicts(wait_s)

    def close(self) -> None:
        self._grammars.close()

    def forget(self, row: int) -> None:
        """Have the row's matcher made anew when it is needed."""
        self._matchers.pop(row, None)

    def of(self, row: int, sampling: RowSampling) -> Matcher:
        """Return the row's matcher. Raises RequestError where its grammar cannot be compiled."""
        found = self._matchers.get(row)
        if found is None or found[0] is not sampling:
            assert sampling.grammar is not None
            found = self._matchers[row] = (sampling, self._grammars.begin(sampling.grammar))
        return found[1]
