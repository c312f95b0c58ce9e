"""What a group of layers still reads of a sequence: all of it, or a window that ends where the
sequence does.

Owns the arithmetic that the KV manager, the limits and the planner must agree on. A *place* is a
block's number within its sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.common.numbers import ceil_div


class KeptWindow(NamedTuple):
    """What a group of layers with a sliding window keeps of a sequence."""

    span: int
    """Tokens kept, the next one included: the window, or more where blocks are longer. The last
    full block is always kept, so that a cached prefix can be continued from it."""
    block_size: int
    max_places: int
    """Places held at once at most, while `num_ahead` tokens are computed beyond the known ones."""

    def first_place(self, num_computed: int) -> int:
        """The first place that is read, or written, once so many tokens are computed."""
        return max(0, num_computed - self.span + 1) // self.block_size


def kept_window(window: int, block_size: int, num_ahead: int) -> KeptWindow:
    """Of a window of so many tokens, the query's own included."""
    span = max(window, block_size + 1)
    # One place more for the ends of the span within blocks, and one so that a prompt that holds
    # all it may hold still has something promised.
    return KeptWindow(span, block_size, ceil_div(span - 1 + num_ahead, block_size) + 2)
