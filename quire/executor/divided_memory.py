"""Rank 0's access to the blocks of all ranks: as bytes of the whole model, in which each rank's
heads are where they would be in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.common.numbers import ceil_div
from quire.parallel.group import RankGroup
from quire.parallel.shared_memory import Kind, RankCommand
from quire.worker.memory import KVMemory

Payload = NDArray[np.uint8]


class HeldHeads(NamedTuple):
    """Which heads of one tensor of the pool each rank has."""

    num_heads: int
    of_rank: tuple[range, ...]


class DividedBlocks:
    """Reads and writes blocks of all ranks."""

    def __init__(self, own: KVMemory, group: RankGroup, held: Sequence[HeldHeads]) -> None:
        """`held` is of each tensor, in the order in which `own` has them."""
        self._own, self._group, self._held = own, group, tuple(held)
        sizes = [tensor[0, 0].nbytes for tensor in own.tensors]
        self._head_bytes = sizes
        num_ranks = group.shape.num_ranks
        self._part_bytes = [
            sum(size * len(each.of_rank[rank]) for size, each in zip(sizes, held, strict=True))
            for rank in range(num_ranks)
        ]
        self.block_bytes = sum(
            size * each.num_heads for size, each in zip(sizes, held, strict=True)
        )

    def read_blocks(self, blocks: Sequence[int]) -> Payload:
        """Return a copy of some blocks, one behind the other."""
        found = [self._read(piece) for piece in self._pieces(blocks)]
        return np.concatenate(found).reshape(-1) if found else np.empty(0, np.uint8)

    def write_blocks(self, blocks: Sequence[int], payload: Payload) -> None:
        """Write what `read_blocks` returned into as many blocks."""
        rows, start = payload.reshape(len(blocks), -1), 0
        for piece in self._pieces(blocks):
            self._write(piece, rows[start : start + len(piece)])
            start += len(piece)

    def _pieces(self, blocks: Sequence[int]) -> list[Sequence[int]]:
        """Blocks as many at a time as a command holds."""
        row_bytes = len(self._part_bytes) * (max(self._part_bytes) + 4) + 8
        at_once = max(1, self._group.memory.command_bytes // 2 // row_bytes)
        return [blocks[first : first + at_once] for first in range(0, len(blocks), at_once)]

    def _room(self, blocks: Sequence[int]) -> torch.Tensor:
        num_words = ceil_div(len(blocks) * max(self._part_bytes), 4)
        return torch.zeros(len(self._part_bytes), num_words, dtype=torch.int32)

    def _read(self, blocks: Sequence[int]) -> Payload:
        command = RankCommand(
            Kind.READ_BLOCKS, (), (torch.tensor(blocks, dtype=torch.int64), self._room(blocks))
        )
        own = self._group.call(command, lambda: self._own.read_blocks(blocks))
        with self._group.uninterrupted():
            self._group.exchange.native.wait_done()
        _, room = self._group.memory.read().tensors
        assert room is not None
        whole = np.empty((len(blocks), self.block_bytes), np.uint8)
        for rank, num_bytes in enumerate(self._part_bytes):
            part = own if rank == 0 else room[rank].view(torch.uint8).numpy()
            self._put(whole, rank, part[: len(blocks) * num_bytes].reshape(len(blocks), -1))
        return whole

    def _write(self, blocks: Sequence[int], rows: Payload) -> None:
        room = self._room(blocks)
        for rank, num_bytes in enumerate(self._part_bytes):
            part = self._taken(rows, rank).reshape(-1)
            room[rank].view(torch.uint8).numpy()[: len(blocks) * num_bytes] = part
        command = RankCommand(
            Kind.WRITE_BLOCKS, (), (torch.tensor(blocks, dtype=torch.int64), room)
        )
        mine = self._taken(rows, 0).reshape(-1)
        self._group.call(command, lambda: self._own.write_blocks(blocks, mine))

    def _put(self, whole: Payload, rank: int, part: Payload) -> None:
        """Put a rank's heads where they are in the whole."""
        at = start = 0
        for size, each in zip(self._head_bytes, self._held, strict=True):
            heads = each.of_rank[rank]
            own = len(heads) * size
            first = start + heads.start * size
            whole[:, first : first + own] = part[:, at : at + own]
            at, start = at + own, start + each.num_heads * size

    def _taken(self, whole: Payload, rank: int) -> Payload:
        """Return a rank's heads of the whole."""
        start, parts = 0, []
        for size, each in zip(self._head_bytes, self._held, strict=True):
            heads = each.of_rank[rank]
            parts.append(whole[:, start + heads.start * size : start + heads.stop * size])
            start += each.num_heads * size
        return np.concatenate(parts, axis=1)
