"""Arrays keep their shapes, dtypes and values on the way through one buffer."""

from __future__ import annotations

import numpy as np
import torch

from quire.worker.staging import Array, Staging, pack, packed_len, unpack

ARRAYS: list[Array] = [
    np.arange(7, dtype=np.int64),
    np.array([3], dtype=np.int32),
    np.arange(15, dtype=np.int32).reshape(3, 5)[:, :4],  # not contiguous
    np.zeros((2, 0), dtype=np.int32),
    np.array([-1, 2**40], dtype=np.int64),
]


def test_what_is_packed_is_unpacked() -> None:
    buffer = torch.full((packed_len(ARRAYS),), 255, dtype=torch.uint8)
    pack(ARRAYS, buffer)
    for array, tensor in zip(ARRAYS, unpack(ARRAYS, buffer), strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert tensor.data_ptr() % 16 == buffer.data_ptr() % 16 or not tensor.numel()


def test_on_the_cpu_nothing_is_copied() -> None:
    tensors = Staging(torch.device("cpu"))(ARRAYS)
    assert tensors[0].data_ptr() == ARRAYS[0].ctypes.data
