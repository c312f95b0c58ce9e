"""A step's small arrays on their way to the device: one pinned buffer, one copy, whatever their
number.

Waits for nothing: each call has a buffer of its own, which torch keeps until its copy is done and
then gives to a later call. On the CPU arrays become tensors where they lie. Holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

_ALIGNMENT = 16
"""Of each array within the buffer, in bytes: what a GPU loads at once,
and what Triton specialises kernels for."""
_MIN_BYTES = 1 << 16


class Staging:
    """Moves arrays to one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return the arrays as tensors on the device. Those of a GPU are views of one block,
        valid as any tensor is."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        return unpack(arrays, _pinned(arrays).to(self.device, non_blocking=True))

    def into(self, arrays: Sequence[Array], place: Tensor) -> list[Tensor]:
        """Return the arrays at the beginning of `place` (uint8, on the device), which keeps its
        address: for captured steps."""
        num_bytes = packed_len(arrays)
        if self.device.type == "cpu":
            pack(arrays, place)
        else:
            place[:num_bytes].copy_(_pinned(arrays), non_blocking=True)
        return unpack(arrays, place)


def _pinned(arrays: Sequence[Array]) -> Tensor:
    """Packed in pinned memory of `_MIN_BYTES` at least, so that the small ones, which most are,
    have one size."""
    num_bytes = packed_len(arrays)
    host = torch.empty(max(_MIN_BYTES, num_bytes), dtype=torch.uint8, pin_memory=True)[:num_bytes]
    pack(arrays, host)
    return host


def packed_len(arrays: Sequence[Array]) -> int:
    """Return bytes that `pack` needs."""
    return sum(_padded(array) for array in arrays)


def pack(arrays: Sequence[Array], buffer: Tensor) -> None:
    """Write the arrays one after another into `buffer` (uint8, on the host)."""
    memory, start = buffer.numpy(), 0
    for array in arrays:
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        start += _padded(array)


def unpack(arrays: Sequence[Array], buffer: Tensor) -> list[Tensor]:
    """Views of a packed buffer, on any device, that have the arrays' shapes and dtypes."""
    found, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        found.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _padded(array)
    return found


def _padded(array: Array) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
