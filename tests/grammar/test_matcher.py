"""Where a row stands in its grammar depends on its tokens alone, whatever it was asked before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from vocabularies import EOS, QUOTES, TRUE, UNUSED, byte_vocabulary

from quire.core.grammars import Grammar
from quire.errors import RequestError
from quire.grammar.matcher import Matcher
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
