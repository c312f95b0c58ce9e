"""Where a row stands in its grammar depends on its tokens alone, whatever it was asked before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from vocabularies import EOS, QUOTES, TRUE, UNUSED, byte_vocabulary

from quire.core.drafts import HABIT, LONGEST, ONLY
from quire.core.grammars import Grammar
from quire.errors import RequestError
from quire.grammar.matcher import Habits, Matcher
from quire.grammar.table import GrammarTable

LIST = Grammar("json_compact", '{"type":"array","items":{"type":"boolean"},"maxItems":2}')


def allowed(matcher: Matcher, output: bytes | list[int]) -> set[int]:
    """The ids that may follow."""
    mask = matcher.allowed(np.array(list(output), np.int64))
    assert mask.dtype == np.bool_ and len(mask) == 260
    return set(np.flatnonzero(mask).tolist())


def test_only_what_continues_the_form_is_allowed() -> None:
    table = GrammarTable(byte_vocabulary)
    matcher = table.begin(LIST)
    assert allowed(matcher, b"") == {ord("[")}
    assert allowed(matcher, b"[") == {ord("]"), ord("t"), ord("f"), TRUE}
    assert allowed(matcher, [ord("["), TRUE]) == {ord(","), ord("]")}
    assert allowed(matcher, b"[true]") == {EOS}
    any_text = table.begin(Grammar("regex", "(?s:.)*"))
    # which begin no character here
    assert {UNUSED} == set(range(260)) - allowed(any_text, b"") - set(range(128, 256))
    assert QUOTES in allowed(table.begin(Grammar("json", '{"type":"string","maxLength":1}')), b"")


def test_the_state_is_built_anew_and_taken_back() -> None:
    grammar = Grammar(
        "json",
        '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}},"required":["a"]}',
    )
    table = GrammarTable(byte_vocabulary)
    text = b'{"a": -120, "b": "x\\n\\"y"}'
    expected = [allowed(table.begin(grammar), text[:length]) for length in range(len(text) + 1)]
    matcher, rng = table.begin(grammar), random.Random(3)
    for _ in range(200):
        length = rng.randrange(len(text) + 1)
        assert allowed(matcher, text[:length]) == expected[length]
    # other tokens, not only fewer
    assert allowed(matcher, b'{"a":7') == allowed(table.begin(grammar), b'{"a":7')


def test_tokens_that_break_the_form_end_the_row() -> None:
    matcher = GrammarTable(byte_vocabulary).begin(LIST)
    with pytest.raises(RequestError, match="does not have the form"):
        allowed(matcher, b"[x")


def ahead(matcher: Matcher, output: bytes | list[int], most: int, habits: Habits) -> list[int]:
    """The tokens that will probably follow."""
    return [token for token, _ in matcher.ahead(np.array(list(output), np.int64), most, habits)]


def test_a_look_ahead_changes_no_mask() -> None:
    """Whatever was looked at before, and however the output went on."""
    table, rng = GrammarTable(byte_vocabulary), random.Random(5)
    schema = '{"type":"object","properties":{"alpha":{"type":"boolean"},"alps":{"type":"integer"}}}'
    grammar, habits = Grammar("json_compact", schema), Habits()
    matcher, output = table.begin(grammar), list[int]()
    for _ in range(300):
        fresh = table.begin(grammar)
        options = allowed(fresh, output)
        assert allowed(matcher, output) == options
        if rng.random() < 0.7:
            ahead(matcher, output, rng.randrange(9), habits)
        options -= {EOS}
        if not options or rng.random() < 0.15:
            output = output[: rng.randrange(len(output) + 1)]
        else:
            output = [*output, rng.choice(sorted(options))]


def test_what_is_forced_and_what_is_usual_is_found_ahead() -> None:
    matcher, habits = GrammarTable(byte_vocabulary).begin(LIST), Habits()
    start = np.array([], np.int64)
    assert matcher.ahead(start, 9, habits) == [(ord("["), ONLY)], "t, f, true or ]"
    output = [ord("["), TRUE]
    assert ahead(matcher, output, 9, habits) == [], "a comma or ]"
    assert ahead(matcher, [*output, ord("]")], 9, habits) == [], "the end is not drafted"
    assert matcher.ahead(start, 9, habits) == [
        (ord("["), ONLY), (TRUE, HABIT), (ord("]"), HABIT),
    ]  # fmt: skip
    letters = GrammarTable(byte_vocabulary).begin(Grammar("regex", "true!"))
    assert letters.ahead(start, 9, habits) == [(TRUE, LONGEST), (ord("!"), ONLY)]


def test_habits_are_bounded() -> None:
    habits = Habits(most=3)
    for token_id in range(9):
        habits.learn((token_id, (1, 2)), 1)
    assert [habits.of((token_id, (1, 2))) for token_id in range(9)] == [None] * 6 + [1] * 3
