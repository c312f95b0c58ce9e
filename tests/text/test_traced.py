"""Traced text is an ordinary string in value,
and never claims trust for a character that has none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.traced import join_traced, spans_of, trace

# Capital letters are trusted at level 2, digits at level 1, everything else is not: the value
# itself says what is right.
PARTS = st.lists(st.text("AB") | st.text("12") | st.text("ab ,\n"), max_size=6)


def _make(parts: list[str]) -> str:
    return join_traced(
        [
            trace(part, 2 if part[:1].isupper() else 1) if part[:1] in "AB12" else part
            for part in parts
        ]
    )


def _assert_honest(text: str) -> None:
    levels = [0] * len(text)
    for start, end, level in spans_of(text):
        assert 0 <= start < end <= len(text)
        levels[start:end] = [level] * (end - start)
    assert levels == [2 if char in "AB" else 1 if char in "12" else 0 for char in text]


OPERATIONS: dict[str, Any] = {
    "slice": lambda text: [text[1:], text[:-1], text[2:4], text[-3:-1], text[4:1], text[:99]],
    "index": lambda text: [text[0], text[-1:]] if text else [],
    "strip": lambda text: [
        text.strip(),
        text.lstrip("A1 "),
        text.rstrip("ab\n"),
        text.strip("AB12ab ,\n"),
    ],
    "split": lambda text: [*text.split(), *text.split(","), *text.split("A", 1), *text.split(" A")],
    "rsplit": lambda text: [*text.rsplit(), *text.rsplit("a", 1), *text.rsplit(None, 1)],
    "splitlines": lambda text: [*text.splitlines(), *text.splitlines(True)],
    "partition": lambda text: [*text.partition("A"), *text.rpartition("1a")],
    "replace": lambda text: [
        text.replace("A", "x"),
        text.replace("aA", trace("B", 2)),
        text.replace("b", "", 1),
    ],
    "prefix": lambda text: [text.removeprefix("A"), text.removesuffix("1"), text.removeprefix("b")],
    "join": lambda text: [trace("AB", 2).join([text, "a", text]), str(text)],
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(parts=PARTS)
def test_operations_keep_value_and_record(name: str, parts: list[str]) -> None:
    text = _make(parts)
    plain = "".join(parts)
    assert text == plain and hash(text) == hash(plain) and isinstance(text, str)
    results = OPERATIONS[name](text)
    for result, expected in zip(results, OPERATIONS[name](plain), strict=True):
        assert result == expected
        _assert_honest(result)


@given(PARTS)
def test_operations_that_are_not_traced_lose_the_record(parts: list[str]) -> None:
    text = _make(parts)
    for result in (
        text[::-1],
        text * 2,
        text.center(99),
        text.title(),
        f"{text}!",
        text.casefold(),
    ):
        assert spans_of(result) == ()
    assert text.lower() == "".join(parts).lower()


def test_case_changes_keep_the_record_of_ascii() -> None:
    assert spans_of(trace("ab", 2).upper()) == ((0, 2, 2),)
    assert spans_of(trace("ß", 2).upper()) == ()


def test_touching_spans_of_a_level_are_one() -> None:
    assert spans_of(
        join_traced([trace("a", 2), trace("b", 2), "c", trace("d", 1), trace("e", 2)])
    ) == (
        (0, 2, 2),
        (3, 4, 1),
        (4, 5, 2),
    )
