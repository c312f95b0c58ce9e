"""The memory that the ranks of a group map: what they exchange in the middle of a step, and what
rank 0 asks of the others.

It has no name, so that no other process can open it, nothing is left behind by one that is killed,
and no limit on /dev/shm applies: a rank inherits its descriptor. Ranks that cannot have one memory
have a copy each, and send one another what they write (`quire.parallel.transports`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.common.numbers import align_up
from quire.errors import ConfigError
from quire.kernels.exchange import Exchange

GATHER_BYTES = 16 << 20
"""Of both buffers. Larger values go through them piece by piece: half of it stays within the caches
that cores share."""
MOST_GATHERED_BYTES = GATHER_BYTES // 2
"""Of a row: each buffer holds at least one."""
_ALIGNMENT = 64
_MAX_HEADER = 256
"""Numbers that a command may have, shapes of tensors included."""
_DTYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.uint8)


class Kind(IntEnum):
    """Of a command."""

    FORWARD = 0
    LOGITS = 1
    ARGMAX = 2
    COPY_BLOCKS = 3
    STAGE = 4
    READ_BLOCKS = 5
    WRITE_BLOCKS = 6
    LOAD_ADAPTER = 7


class RankCommand(NamedTuple):
    """What rank 0 asks of the others. Tensors that are read are views of the shared memory, valid
    until the command is done."""

    kind: int
    numbers: tuple[int, ...]
    tensors: tuple[Tensor | None, ...]


class Extent(NamedTuple):
    """Some of the memory."""

    first: int = 0
    num_bytes: int = 0


class SharedMemory:
    """One process's mapping."""

    def __init__(self, fileno: int, command_bytes: int) -> None:
        """`fileno` is that of `create_memory`, with the same `command_bytes`; -1 for memory that
        this process has alone."""
        from quire.kernels.cpu import _native

        self._state_bytes = align_up(_native.GROUP_STATE_BYTES, mmap.PAGESIZE)
        self._command_start = self._state_bytes + GATHER_BYTES
        self._map = mmap.mmap(fileno, self._command_start + command_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.command_bytes = command_bytes

    def exchange(self, rank: int, num_ranks: int, silence_s: float) -> Exchange:
        """Return a rank's access."""
        from quire.kernels.cpu import _native

        native = _native.Gathering(self._bytes.data_ptr(), GATHER_BYTES, rank, num_ranks, silence_s)
        return Exchange(native, rank, num_ranks, self)

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return len(self._bytes)

    def extent_of(self, view: Tensor) -> Extent:
        """Return where a contiguous view of this memory lies."""
        return Extent(view.data_ptr() - self._bytes.data_ptr(), view.nbytes)

    def write(self, command: RankCommand) -> Extent:
        """Put a command down, and return where it lies. The one before must be done."""
        header = [command.kind, len(command.numbers), *command.numbers, len(command.tensors)]
        for tensor in command.tensors:
            shape = [] if tensor is None else list(tensor.shape)
            header += [-1 if tensor is None else _DTYPES.index(tensor.dtype), len(shape), *shape]
        assert len(header) <= _MAX_HEADER, "a command with too many tensors"
        self._header()[: len(header)] = header
        end = self._command_start + _MAX_HEADER * 8
        for tensor, place in zip(command.tensors, self._places(command.tensors), strict=True):
            if tensor is not None and tensor.numel():
                place.copy_(tensor.contiguous().view(torch.uint8).view(-1))
                end = sum(self.extent_of(place))
        return Extent(self._command_start, end - self._command_start)

    def read(self) -> RankCommand:
        """Return the command that was put down."""
        numbers = iter(self._header().tolist())
        kind, count = next(numbers), next(numbers)
        values = tuple(next(numbers) for _ in range(count))
        found: list[Tensor | None] = []
        for _ in range(next(numbers)):
            code, num_dims = next(numbers), next(numbers)
            shape = [next(numbers) for _ in range(num_dims)]
            found.append(None if code < 0 else torch.empty(shape, dtype=_DTYPES[code]))
        tensors = tuple(
            None if each is None else place.view(each.dtype).view(each.shape)
            for each, place in zip(found, self._places(found), strict=True)
        )
        return RankCommand(kind, values, tensors)

    def rows(self, first: int, width: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return rows [count, width] of a value that lies where the tensors of commands would."""
        row_bytes = width * dtype.itemsize
        start = self._command_start + _MAX_HEADER * 8 + first * row_bytes
        assert start + count * row_bytes <= len(self._bytes), "rows that do not fit"
        return self._bytes[start : start + count * row_bytes].view(dtype).view(count, width)

    def _header(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.frombuffer(self._map, np.int64, _MAX_HEADER, self._command_start)

    def _places(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return where the bytes of a command's tensors lie, one behind the other."""
        start, places = self._command_start + _MAX_HEADER * 8, []
        for tensor in tensors:
            num_bytes = 0 if tensor is None else tensor.nbytes
            assert start + num_bytes <= len(self._bytes), "a command that does not fit"
            places.append(self._bytes[start : start + num_bytes])
            start += align_up(num_bytes, _ALIGNMENT)
        return places


def create_memory(command_bytes: int) -> int:
    """Return the descriptor of new memory, all zeros. Raises ConfigError where the system has
    none without a name."""
    from quire.kernels.cpu import _native

    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            "tensor_parallel_size and pipeline_parallel_size above 1 need memory without a "
            "name, which this system does not have; give distributed_executor_backend='sockets'"
        )
    fileno = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    state_bytes = align_up(_native.GROUP_STATE_BYTES, mmap.PAGESIZE)
    os.ftruncate(fileno, state_bytes + GATHER_BYTES + command_bytes)
    return fileno


def bytes_of_command(num_bytes: int, num_tensors: int) -> int:
    """Return the room for commands whose tensors take so many bytes together."""
    return align_up(_MAX_HEADER * 8 + num_bytes + num_tensors * _ALIGNMENT, mmap.PAGESIZE)
