"""The target's hidden states, kept for a draft head beside its keys and values: of each slot of the
pool, the state of the token that was computed there last.

So what shares blocks shares states, and a head can compute a position at any later time. What it
keeps of the last position of a block depends on the token behind the block, too: where sequences
share a block and go on differently, it is that of the one that was drafted first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import BlockCopy, RowSampling
from quire.kernels.interface import Kernels, PackedLinear
from quire.spec.places import KnownRows


class KeptStates:
    """Implements `StateKeeper`. On the CPU."""

    def __init__(self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype) -> None:
        """`width` is that of a target's hidden state."""
        self._width, self._block_size = width, block_size
        self.states = torch.zeros((num_blocks * block_size, width), dtype=dtype)
        """[slots of the pool, width of what is kept]."""
        self.weights: Sequence[Tensor] = ()
        """Of the projection that makes it, if one does."""
        self._fuse: Callable[[Tensor], Tensor] | None = None

    def fuse_with(self, kernels: Kernels, weight: PackedLinear) -> None:
        """Keep what a projection makes of the columns behind the hidden states."""
        self.states = self.states.new_zeros((len(self.states), weight.num_outputs))
        self.weights, self._fuse = weight.tensors, lambda columns: kernels.linear(columns, weight)

    @property
    def num_bytes(self) -> int:
        """Memory, resident or not."""
        return self.states.nbytes

    def keep(self, states: Tensor, slots: Tensor) -> Tensor:
        """See `StateKeeper.keep`."""
        if self._fuse is None:
            self.states.index_copy_(0, slots, states)
            return states
        self.states.index_copy_(0, slots, self._fuse(states[:, self._width :].contiguous()))
        return states[:, : self._width].contiguous()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Take along what a plan copies; all reads happen before any write."""
        if copies:
            blocks = self.states.view(-1, self._block_size, self.states.shape[1])
            sources, destinations = (torch.tensor(ids) for ids in zip(*copies, strict=True))
            blocks[destinations] = blocks[sources]

    def at(self, blocks: NDArray[np.int32], positions: NDArray[np.int64]) -> Tensor:
        """Return the states of some positions, [T, H], of a row with these blocks."""
        slots = blocks[positions // self._block_size].astype(np.int64) * self._block_size
        return self.states.index_select(0, torch.from_numpy(slots + positions % self._block_size))


class ShiftedRows:
    """Implements `KnownRows`: the rows as a head sees them, whose token at each position is the one
    behind it."""

    def __init__(self, rows: KnownRows) -> None:
        self._rows = rows

    @property
    def block_size(self) -> int:
        """As it is."""
        return self._rows.block_size

    @property
    def num_groups(self) -> int:
        """As it is."""
        return self._rows.num_groups

    @property
    def sampling(self) -> list[RowSampling]:
        """As they are."""
        return self._rows.sampling

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Positions whose next token is known."""
        return self._rows.num_tokens - 1

    @property
    def num_prompt_tokens(self) -> NDArray[np.int64]:
        """As they are."""
        return self._rows.num_prompt_tokens

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """As they are."""
        return self._rows.block_tables

    def tokens(self, row: int) -> NDArray[np.integer[Any]]:
        """The token behind each position."""
        return self._rows.tokens(row)[1:]
