"""The words in which a program is given rows from outside, for tokens that no table has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class PlacedRows(NamedTuple):
    """Rows that a step brings for some of its tokens."""

    tokens: Tensor
    """Their places in the batch, int64 [M], each once."""
    rows: Tensor
    """[M, width] in the compute dtype."""


class RowSource(Protocol):
    """Knows which positions of the worker's rows have content of their own."""

    def of_step(
        self, rows: Sequence[int], query_start: Tensor, context_len: Tensor
    ) -> PlacedRows | None:
        """Look up the sequences in these rows, whose tokens begin at `query_start`, int32 [S + 1],
        and whose contexts end at `context_len`, int32 [S]; None where none of their tokens has
        any."""
        ...
