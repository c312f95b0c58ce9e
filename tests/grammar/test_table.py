"""Compiled grammars: verdicts, the budget, and what is done where one
was dropped or cannot be had."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from vocabularies import byte_vocabulary

from quire.core.grammars import GRAMMARS, Grammar, GrammarVerdict
from quire.core.plan import RowSampling, StepPlan
from quire.errors import RequestError
from quire.grammar import table as table_module
from quire.grammar.backend import Vocabulary
from quire.grammar.rows import RowMatchers
from quire.grammar.table import GrammarTable


@pytest.fixture
def table() -> Iterator[GrammarTable]:
    made = GrammarTable(byte_vocabulary)
    yield made
    made.close()


def verdicts(table: GrammarTable, count: int) -> list[GrammarVerdict]:
    found: list[GrammarVerdict] = []
    deadline = time.monotonic() + 100
    while len(found) < count:
        assert time.monotonic() < deadline
        found += table.take_verdicts(0.1)
    return found


def test_every_grammar_that_is_asked_for_gets_a_verdict(table: GrammarTable) -> None:
    assert table.take_verdicts(5.0) == ()  # nothing was asked, so nothing is waited for
    good, bad = Grammar("regex", "[ab]+"), Grammar("regex", "(?=a)")
    table.ask([good, bad, good])
    first, second, third = verdicts(table, 3)
    assert first == third == GrammarVerdict(good)
    assert second.grammar == bad and second.error is not None and "look-around" in second.error
    assert len(table) == 1


def test_what_is_dropped_is_compiled_again(
    table: GrammarTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "MAX_GRAMMARS", 3)
    grammars = [Grammar("regex", f"a{number}") for number in range(10)]
    table.ask(grammars)
    verdicts(table, 10)
    assert len(table) == 3
    for number, grammar in enumerate(grammars):
        mask = table.begin(grammar).allowed(np.array([ord("a")]))
        assert mask[ord("0") + number] and mask.sum() == 1
    monkeypatch.setattr(table_module, "MAX_TEXT_BYTES", 40)
    table.ask([Grammar("regex", "x" * 100), Grammar("regex", "y" * 30)])
    verdicts(table, 2)
    assert len(table) == 1


def test_without_a_vocabulary_nothing_is_taken_on_trust() -> None:
    for make in (None, _raise):
        table = GrammarTable(make)
        table.ask([Grammar("regex", "a")])
        ((_, error),) = verdicts(table, 1)
        assert error
        with pytest.raises(RequestError):
            table.begin(Grammar("regex", "a"))
        table.close()


def _raise() -> Vocabulary:
    raise RuntimeError("no such file")


def test_rows_keep_their_state_until_they_are_forgotten(table: GrammarTable) -> None:
    rows = RowMatchers(table)
    first, second = (RowSampling(seed=seed, grammar=Grammar("regex", "ab*")) for seed in (1, 2))
    assert rows.of(7, first) is rows.of(7, first) is not rows.of(8, first)
    before = rows.of(7, first)
    assert rows.of(7, second) is not before, "the row has another owner"
    rows.begin(StepPlan(1, removed_rows=(7, 9)))
    assert len(rows) == 1 and rows.of(8, first) is not before


def test_orders_of_a_plan_become_news_of_a_result(table: GrammarTable) -> None:
    """Also where records have travelled and are plain tuples."""
    rows = RowMatchers(table)
    assert rows.take_news(5.0) == ()  # nothing was ordered, so nothing is waited for
    rows.begin(StepPlan(1, orders={GRAMMARS: (("regex", "a"),)}))
    assert rows.take_news(100.0) == (GrammarVerdict(Grammar("regex", "a")),)
    rows.close()
