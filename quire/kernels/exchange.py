"""What the ranks of one model exchange in the middle of a step: parts of values, each computed by
one of them, put together by all (csrc/cpu/gathering.hpp). No number is changed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.kernels.cpu import _native


class Exchange:
    """One rank's access to the memory that all of them share.

    All ranks make the same calls in the same order. A call returns when all have made it, or raises
    RuntimeError when one of them is gone or silent: the group is then of no more use.
    """

    def __init__(
        self, native: _native.Gathering, rank: int, num_ranks: int, memory: object
    ) -> None:
        """`memory` is what `native` points into; it is kept."""
        self.native, self.rank, self.num_ranks = native, rank, num_ranks
        self._memory = memory

    def columns(self, own: Tensor, columns: Sequence[range], width: int) -> Tensor:
        """Return rows [T, width] on the CPU, of which `own` has this rank's columns side by
        side."""
        out = torch.empty((len(own), width), dtype=own.dtype)
        places = [(part.start, part.stop) for part in columns]
        source = own.contiguous()
        self.native.columns(
            source.data_ptr(), len(own), places, width, own.element_size(), out.data_ptr()
        )
        return out

    def rows(self, rows: Tensor, is_own: Tensor) -> Tensor:
        """Fill in the rows [T, width] that other ranks have, and return them."""
        assert rows.is_contiguous() and is_own.dtype == torch.bool
        row_bytes = rows.shape[1] * rows.element_size()
        self.native.rows(rows.data_ptr(), is_own.tolist(), row_bytes)
        return rows
