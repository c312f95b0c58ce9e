"""Shapes of recorded steps: every step has one, and there are few."""

from __future__ import annotations

from quire.common.graph_shapes import NUM_TOKENS, largest_size, num_shapes, shape_for


def test_shapes_are_few_and_large_enough() -> None:
    for num_tokens in range(1, 1025):
        for context_len in (1, 512, 513, 3000):
            shape = shape_for(num_tokens, context_len, 3000)
            assert shape is not None and shape.num_tokens in NUM_TOKENS
            assert num_tokens <= shape.num_tokens <= max(
                2 * num_tokens, 1
            ) and shape.num_tokens <= largest_size(num_tokens)
            assert context_len <= shape.max_context_len <= 3000
            assert num_tokens <= 192 or shape.num_tokens - num_tokens < 64
    assert shape_for(1025, 1, 3000) is None
    shapes = {shape_for(n, length, 3000) for n in range(1, 97) for length in range(1, 3001, 7)}
    assert len(shapes) == num_shapes(96, 3000) == 10 * 4
