"""The index of a growing text against plain search."""

from __future__ import annotations

import random
import time

import pytest

from quire.core.speculation.ngrams import MAX_LENGTH, NgramIndex


def _longest_match(text: list[int], tail: list[int], most: int) -> int:
    """Length of the longest suffix of `tail` that stands in `text`."""
    places = range(len(text))
    for length in range(min(most, len(tail)), 0, -1):
        if any(text[place : place + length] == tail[-length:] for place in places):
            return length
    return 0


@pytest.mark.parametrize("sizes", [(1,), (2, 3, 4), (3,)])
def test_the_longest_n_gram_is_found(sizes: tuple[int, ...]) -> None:
    rng = random.Random(1)
    text: list[int] = []
    index = NgramIndex(sizes, most=max(sizes))
    for _ in range(200):
        text.append(rng.randrange(3))
        index.extend(text[-1:])
        index.index(len(index) - 1)
        length, end = index.find(text)
        expected = _longest_match(text[:-1], text, max(sizes))
        assert length == (expected if expected >= min(sizes) else 0)
        if length:
            assert end < len(text) - 1 and text[end + 1 - length : end + 1] == text[-length:]


def test_tokens_are_taken_in_one_by_one_or_together() -> None:
    rng = random.Random(2)
    text = [rng.randrange(4) for _ in range(300)]
    one_by_one, together = NgramIndex((2, 5)), NgramIndex((2, 5))
    for place, token_id in enumerate(text):
        one_by_one.extend([token_id])
        one_by_one.index(place + 1)
    for start in range(0, 300, 37):
        together.extend(text[start : start + 37])
        together.index(len(together))
    for _ in range(200):
        tail = [rng.randrange(4) for _ in range(8)]
        assert one_by_one.find(tail) == together.find(tail)


def test_a_match_of_any_length_is_followed() -> None:
    """Where a short n-gram stood later as well, the hint leads on."""
    rng = random.Random(3)
    copied = [rng.randrange(4) for _ in range(200)]
    index, tail, hint = NgramIndex((2, 5)), list[int](), -1
    index.extend([*copied, *(rng.randrange(4) for _ in range(200))])
    index.index(len(index))
    for place, token_id in enumerate(copied):
        tail.append(token_id)
        length, end = index.find(tail, hint)
        assert length == len(index.token_ids[: end + 1]) or length <= MAX_LENGTH
        if place > 40:
            assert (length, end) == (min(place + 1, MAX_LENGTH), place)
        hint = end + 1 if length else -1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["periodic", "random", "constant"])
def test_an_index_grows_in_linear_time(kind: str) -> None:
    def text(length: int) -> list[int]:
        if kind == "random":
            return random.Random(3).choices(range(50), k=length)
        return [place % (7 if kind == "periodic" else 1) for place in range(length)]

    def seconds(length: int) -> float:
        index, tokens, began = NgramIndex((2, 5)), text(length), time.thread_time()
        for place in range(0, length, 4):
            index.extend(tokens[place : place + 4])
            index.index(len(index) - 1)
            index.find(index.token_ids)
        return time.thread_time() - began

    times = [min(seconds(length) for _ in range(3)) for length in (10_000, 40_000)]
    assert times[-1] < 12 * times[0], f"quadratic time would be sixteen times as much: {times}"
