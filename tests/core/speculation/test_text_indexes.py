"""Indexes of a growing text against plain search."""

from __future__ import annotations

import random
import time

import pytest

from quire.core.speculation.automaton import SuffixAutomaton
from quire.core.speculation.lookup import TextIndex
from quire.core.speculation.ngrams import NgramIndex


def _longest_match(text: list[int], tail: list[int], most: int) -> int:
    """Length of the longest suffix of `tail` that stands in `text`."""
    places = range(len(text))
    for length in range(min(most, len(tail)), 0, -1):
        if any(text[place : place + length] == tail[-length:] for place in places):
            return length
    return 0


def _check_match(index: TextIndex, text: list[int], most: int, least: int = 1) -> None:
    length, end = index.match
    expected = 0
    for size in range(least, min(most, len(text) - 1) + 1):
        starts = range(len(text) - size)
        if any(text[place : place + size] == text[-size:] for place in starts):
            expected = size
    assert length == expected
    if length:
        assert end < len(text) - 1 and text[end + 1 - length : end + 1] == text[-length:]


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 500])
def test_an_automaton_finds_the_longest_suffix_that_occurred_before(num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    text: list[int] = []
    index = SuffixAutomaton()
    for _ in range(120):
        text.append(rng.randrange(num_tokens))
        index.append(text[-1])
        _check_match(index, text, len(text))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (3, 3)])
def test_n_grams_are_found_where_they_ended_last(sizes: tuple[int, int]) -> None:
    rng = random.Random(1)
    text: list[int] = []
    index = NgramIndex(*sizes)
    for _ in range(200):
        text.append(rng.randrange(3))
        index.append(text[-1])
        _check_match(index, text, sizes[1], sizes[0])


def test_another_text_is_followed_while_the_automaton_grows() -> None:
    rng = random.Random(2)
    for _ in range(20):
        text, other, index, cursor = list[int](), list[int](), SuffixAutomaton(), (0, 0)
        for _ in range(80):
            for _ in range(rng.randrange(3)):
                text.append(rng.randrange(3))
                index.append(text[-1])
            other.append(rng.randrange(3))
            cursor = index.advance(*cursor, other[-1])
            # What was a match stays one; the text may by now hold a longer one.
            length, end = cursor[1], index.end_of(cursor[0])
            assert length <= _longest_match(text, other, len(other))
            assert not length or text[end + 1 - length : end + 1] == other[-length:]
        still = SuffixAutomaton()
        for token_id in text:
            still.append(token_id)
        cursor = (0, 0)
        for place, token_id in enumerate(other):
            cursor = still.advance(*cursor, token_id)
            assert cursor[1] == _longest_match(text, other[: place + 1], place + 1)


@pytest.mark.parametrize("kind", ["periodic", "random", "fibonacci"])
def test_an_automaton_grows_in_linear_time(kind: str) -> None:
    def text(length: int) -> list[int]:
        if kind == "periodic":
            return [place % 7 for place in range(length)]
        if kind == "random":
            return random.Random(3).choices(range(50), k=length)
        before, word = [0], [0, 1]
        while len(word) < length:
            before, word = word, word + before
        return word[:length]

    def seconds(length: int) -> float:
        index, tokens, began = SuffixAutomaton(), text(length), time.thread_time()
        for token_id in tokens:
            index.append(token_id)
        return time.thread_time() - began

    times = [min(seconds(length) for _ in range(3)) for length in (10_000, 40_000)]
    assert times[-1] < 12 * times[0], f"quadratic time would be sixteen times as much: {times}"
