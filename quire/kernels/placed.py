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


class Rotations(NamedTuple):
    """What turns the heads of each token in place of what its position does."""

    rows: Tensor
    """int64 [T]: of each token, the row of the table."""
    table: Tensor
    """float32 [rows, 2, R / 2]: cosines, then sines, halves paired."""


class StepContent(NamedTuple):
    """What a step brings from outside."""

    placed: PlacedRows | None = None
    """What `Place`, `AddPlaced` and `Take` read."""
    rotations: Rotations | None = None
    """What every `Rope` turns by; None: by positions."""
    key_ends: Tensor | None = None
    """How far every `Attend` sees, int32 [T]: see `Kernels.paged_attention`."""


class ContentSource(Protocol):
    """Knows which positions of the worker's rows have content of their own, and how positions are
    counted beside it."""

    def concerns(self, rows: Sequence[int]) -> bool:
        """Whether any sequence in these rows has any."""
        ...

    def of_step(
        self, rows: Sequence[int], query_start: Tensor, context_len: Tensor
    ) -> StepContent | None:
        """Look up the sequences in these rows, whose tokens begin at `query_start`, int32 [S + 1],
        and whose contexts end at `context_len`, int32 [S]; None where none of them has any."""
        ...
