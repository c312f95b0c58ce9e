"""Shapes of steps that can be recorded once and replayed: shared by the planner,
which counts them, and the worker."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

NUM_TOKENS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, *range(256, 1025, 64))
"""Padding costs at most a half more tokens from 16 on, where a step is still bound by reading the
weights; beyond, nothing that tiles of 64 rows would not cost anyway.
"""
_MIN_CONTEXT_LEN = 512


class StepShape(NamedTuple):
    """A step of `num_tokens` tokens of which none looks back further than
    `max_context_len` positions."""

    num_tokens: int
    max_context_len: int


def shape_for(num_tokens: int, context_len: int, max_model_len: int) -> StepShape | None:
    """Return the smallest shape that a step fits; None where it has too many tokens. Lengths
    double, up to `max_model_len`."""
    if num_tokens > NUM_TOKENS[-1]:
        return None
    length = _MIN_CONTEXT_LEN
    while length < context_len:
        length *= 2
    return StepShape(NUM_TOKENS[bisect_left(NUM_TOKENS, num_tokens)], min(length, max_model_len))


def largest_size(max_num_tokens: int) -> int:
    """Return tokens of the largest shape that steps of up to so many need."""
    return NUM_TOKENS[min(bisect_left(NUM_TOKENS, max_num_tokens), len(NUM_TOKENS) - 1)]


def num_shapes(max_num_tokens: int, max_model_len: int) -> int:
    """Return how many shapes there are for steps of up to so many tokens."""
    num_sizes, num_lengths, length = (
        sum(size <= max_num_tokens for size in NUM_TOKENS),
        1,
        _MIN_CONTEXT_LEN,
    )
    while length < max_model_len:
        num_lengths, length = num_lengths + 1, length * 2
    return num_sizes * num_lengths
