"""Answers that repeat themselves: the rule against its definition, its bounds,
and what a scheduler makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.params import SamplingParams
from quire.core.repetition import MAX_PATTERN_SIZE, RepetitionDetectionParams, RepetitionWatch
from quire.errors import InvalidParameterError

RULES = st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(2, 5)).map(
    lambda each: (each[0], sum(each[:2]), each[2])
)


def ends_with_a_pattern(output: list[int], rule: tuple[int, int, int]) -> bool:
    """The definition."""
    low, high, count = rule
    sizes = [size for size in range(low, high + 1) if size * count <= len(output)]
    return any(output[-size * count :] == output[-size:] * count for size in sizes)


@settings(max_examples=100, deadline=None)
@given(
    output=st.lists(st.integers(0, 2), max_size=40),
    prompt=st.lists(st.integers(0, 2), max_size=6),
    rule=RULES,
)
def test_the_watch_sees_what_the_definition_says(
    output: list[int], prompt: list[int], rule: tuple[int, int, int]
) -> None:
    """Token by token, and also by a watch that comes late; the prompt does not count."""
    watch = RepetitionWatch(rule, len(prompt))
    for length in range(1, len(output) + 1):
        expected = ends_with_a_pattern(output[:length], rule)
        known = prompt + output[:length]
        assert watch.is_looping(known) == expected
        assert RepetitionWatch(rule, len(prompt)).is_looping(known) == expected


def test_work_is_bounded_by_the_window() -> None:
    """Whatever the count and the length: what is kept are at most as
    many runs as there are sizes."""
    watch = RepetitionWatch((1000, MAX_PATTERN_SIZE, 1 << 20), 3)
    assert not watch.is_looping([7] * 5000)
    assert sorted(watch._runs) == list(range(1000, MAX_PATTERN_SIZE + 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": -1}, {"max_pattern_size": 3, "min_count": 1},
        {"max_pattern_size": MAX_PATTERN_SIZE + 1, "min_count": 2},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": True, "min_count": 2}, {"max_pattern_size": 2.0, "min_count": 2},
        {"max_pattern_size": "2", "min_count": 2}, {"min_count": -1},
        {"max_pattern_size": 2, "min_count": 1 << 40}, {"size": 3}, [3, 2], "3",
    ],
)  # fmt: skip
def test_what_is_out_of_bounds_is_refused(fields: Any) -> None:
    with pytest.raises(InvalidParameterError, match="repetition_detection") as caught:
        SamplingParams(repetition_detection=fields)
    assert caught.value.param == "repetition_detection"


def test_names_and_defaults() -> None:
    for off in ({}, {"max_pattern_size": 0, "min_count": 3}, {"max_pattern_size": None}):
        assert RepetitionDetectionParams.from_mapping(off).rule is None
    params = SamplingParams(repetition_detection={"max_pattern_size": 4, "min_count": 3})  # type: ignore[arg-type]
    assert params.clone().repetition_detection == RepetitionDetectionParams(
        max_pattern_size=4, min_count=3
    )
    assert RepetitionDetectionParams(max_pattern_size=4, min_count=3).rule == (1, 4, 3)
    assert RepetitionDetectionParams(4, 2, 3).rule == (2, 4, 3)
