"""Rank 0's access to the blocks of all processes: as bytes of the whole model, in which each one's
layers and heads are where they would be in one process.

The ranks of the first stage answer in the memory of their command. Behind them blocks go from stage
to stage: each adds its own layers to what is read, and takes its own of what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.common.numbers import ceil_div
from quire.kernels.exchange import Exchange
from quire.parallel.group import RankGroup
from quire.parallel.shared_memory import MOST_GATHERED_BYTES, Kind, RankCommand
from quire.worker.memory import KVMemory

Payload = NDArray[np.uint8]


class HeldHeads(NamedTuple):
    """Which heads of one tensor of the pool each rank of a stage has."""

    num_heads: int
    of_rank: tuple[range, ...]
    head_bytes: int
    """Of a block."""


class StageHeads:
    """The tensors of one stage, and where they are in a block of the whole."""

    def __init__(self, start: int, held: Sequence[HeldHeads]) -> None:
        """`held` is of each tensor, in the order in which the stage's processes have them."""
        self._start, self._held = start, tuple(held)
        self.end = start + sum(each.head_bytes * each.num_heads for each in held)

    def part_bytes(self, rank: int) -> int:
        """What a rank has of a block."""
        return sum(each.head_bytes * len(each.of_rank[rank]) for each in self._held)

    def put(self, whole: Payload, rank: int, part: Payload) -> None:
        """Put a rank's part of blocks [n, bytes] where it is in the whole ones."""
        for at, place in self._places(rank):
            whole[:, place] = part[:, at]

    def taken(self, whole: Payload, rank: int) -> Payload:
        """Return a rank's part of whole blocks."""
        return np.concatenate([whole[:, place] for _, place in self._places(rank)], axis=1)

    def _places(self, rank: int) -> list[tuple[slice, slice]]:
        """Where each tensor's heads are: in the rank's part, and in the whole."""
        found, at, start = [], 0, self._start
        for each in self._held:
            heads, size = each.of_rank[rank], each.head_bytes
            own, first = len(heads) * size, start + heads.start * size
            found.append((slice(at, at + own), slice(first, first + own)))
            at, start = at + own, start + each.num_heads * size
        return found


class DividedBlocks:
    """Reads and writes blocks of all processes."""

    def __init__(
        self, own: KVMemory, group: RankGroup, held: Sequence[Sequence[HeldHeads]]
    ) -> None:
        """`held` is of each stage."""
        self._own, self._group = own, group
        self._num_ranks = group.shape.num_ranks
        self._stages: list[StageHeads] = []
        for each in held:
            start = self._stages[-1].end if self._stages else 0
            self._stages.append(StageHeads(start, each))
        self.block_bytes = self._stages[-1].end
        self._part_bytes = max(
            stage.part_bytes(rank) for stage in self._stages for rank in range(self._num_ranks)
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
        row_bytes = self._group.shape.size * (self._part_bytes + 4) + 8
        at_once = max(1, self._group.memory.command_bytes // 2 // row_bytes)
        return [blocks[first : first + at_once] for first in range(0, len(blocks), at_once)]

    def _room(self, blocks: Sequence[int]) -> Tensor:
        num_words = ceil_div(len(blocks) * self._part_bytes, 4)
        return torch.zeros(self._num_ranks, num_words, dtype=torch.int32)

    def _read(self, blocks: Sequence[int]) -> Payload:
        first, numbers = self._stages[0], torch.tensor(blocks, dtype=torch.int64)
        command = RankCommand(Kind.READ_BLOCKS, (), (numbers, self._room(blocks)))
        own = self._group.call(command, lambda: self._own.read_blocks(blocks))
        whole = np.empty((len(blocks), self.block_bytes), np.uint8)
        first.put(whole, 0, own.reshape(len(blocks), -1))
        with self._group.uninterrupted():
            if self._num_ranks > 1:
                self._group.exchange.native.wait_done()
                _, room = self._group.memory.read().tensors
                assert room is not None
                for rank in range(1, self._num_ranks):
                    num_bytes = len(blocks) * first.part_bytes(rank)
                    part = room[rank].view(torch.uint8).numpy()[:num_bytes]
                    first.put(whole, rank, part.reshape(len(blocks), -1))
            for place, part in enumerate(self._read_later(numbers)):
                stage, rank = divmod(place, self._num_ranks)
                self._stages[1 + stage].put(whole, rank, part)
        return whole

    def _read_later(self, blocks: Tensor) -> list[Payload]:
        """Return the parts of the processes behind the first stage, each as wide as the widest."""
        next_stage, results = self._group.next_stage, self._group.results
        if next_stage is None or results is None:
            return []
        nothing = torch.empty((len(blocks), 0), dtype=torch.uint8)
        next_stage.send(RankCommand(Kind.READ_BLOCKS, (self._part_bytes,), (blocks, nothing)))
        num_parts = (len(self._stages) - 1) * self._num_ranks
        out = torch.empty((len(blocks), num_parts * self._part_bytes), dtype=torch.uint8)
        results.receive(1, out)
        return list(np.split(out.numpy(), num_parts, axis=1))

    def _write(self, blocks: Sequence[int], rows: Payload) -> None:
        first, room = self._stages[0], self._room(blocks)
        for rank in range(self._num_ranks):
            part = first.taken(rows, rank).reshape(-1)
            room[rank].view(torch.uint8).numpy()[: part.size] = part
        numbers = torch.tensor(blocks, dtype=torch.int64)
        command = RankCommand(Kind.WRITE_BLOCKS, (), (numbers, room))
        mine = first.taken(rows, 0).reshape(-1)
        self._group.call(command, lambda: self._own.write_blocks(blocks, mine))
        next_stage = self._group.next_stage
        if next_stage is not None:
            parts = np.zeros(
                (len(self._stages) - 1, self._num_ranks, rows.shape[0], self._part_bytes), np.uint8
            )
            for number, stage in enumerate(self._stages[1:]):
                for rank in range(self._num_ranks):
                    parts[number, rank, :, : stage.part_bytes(rank)] = stage.taken(rows, rank)
            with self._group.uninterrupted():
                sent = (numbers, torch.from_numpy(parts))
                next_stage.send(RankCommand(Kind.WRITE_BLOCKS, (self._part_bytes,), sent))


class LaterBlocks:
    """The other end, in a process of a later stage."""

    def __init__(self, memory: KVMemory, stage: int, rank: int, exchange: Exchange | None) -> None:
        """`exchange` is what its stage's ranks have; None where it has one alone."""
        self._memory, self._exchange = memory, exchange
        self._stage, self._rank = stage, rank

    def read(self, command: RankCommand) -> RankCommand:
        """Return the command with what this stage has of the blocks behind what former ones had."""
        (width,), (blocks, collected) = command.numbers, command.tensors
        assert blocks is not None and collected is not None
        own = torch.zeros((len(blocks), width), dtype=torch.uint8)
        found = self._memory.read_blocks(blocks.tolist()).reshape(len(blocks), -1)
        own[:, : found.shape[1]] = torch.from_numpy(found)
        if self._exchange is not None:
            own = self._gather(own, self._exchange)
        return command._replace(tensors=(blocks, torch.cat([collected, own], 1)))

    def _gather(self, own: Tensor, exchange: Exchange) -> Tensor:
        """Return the parts [n, bytes] of all of the stage's ranks side by side, gathered in columns
        of which the exchange's buffer holds at least one row."""
        num_ranks = exchange.num_ranks
        found = torch.empty((len(own), num_ranks, own.shape[1]), dtype=own.dtype)
        for part, room in zip(
            torch.split(own, MOST_GATHERED_BYTES // num_ranks, 1),
            torch.split(found, MOST_GATHERED_BYTES // num_ranks, 2),
            strict=True,
        ):
            size = part.shape[1]
            mine = range(self._rank * size, (self._rank + 1) * size)
            whole = exchange.columns(part.contiguous(), [mine], num_ranks * size)
            room.copy_(whole.view(room.shape))
        return found.view(len(own), -1)

    def write(self, command: RankCommand) -> None:
        """Take this process's part of the blocks."""
        blocks, parts = command.tensors
        assert blocks is not None and parts is not None
        part = parts[self._stage - 1, self._rank, :, : self._memory.block_bytes]
        self._memory.write_blocks(blocks.tolist(), part.contiguous().view(-1).numpy())
