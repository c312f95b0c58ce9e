"""The tensors that hold the KV cache: their dtype names the format, their last dimension is a row
with its scale.

Owns the layout that all back ends share: [B blocks, KV heads, block size, elements of a row], where
a row of int8 or fp8 is D elements and the four bytes of its float32 scale. Knows nothing of layers
or of who uses which block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.common.kv_formats import KV_FORMATS
from quire.kernels.host_memory import empty_bytes

CPU = torch.device("cpu")

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_FORMATS = {dtype: KV_FORMATS[name] for name, dtype in _DTYPES.items()}


def empty_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    kv_format: str,
    device: torch.device = CPU,
) -> Tensor:
    """Return an uninitialised cache for keys, or for values, in one of `KV_FORMATS`.
    Its pages are untouched."""
    chosen = KV_FORMATS[kv_format]
    dtype, width = _DTYPES[kv_format], head_size + chosen.scale_bytes // chosen.element_bytes
    shape = (num_blocks, num_kv_heads, block_size, width)
    if device.type == "cpu":
        return empty_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def head_size_of(cache: Tensor) -> int:
    """D of a cache; TypeError where its dtype is no format."""
    found = _FORMATS.get(cache.dtype)
    if found is None:
        known = ", ".join(map(str, _FORMATS))
        raise TypeError(f"a KV cache of {cache.dtype} is not one of {known}")
    return cache.shape[-1] - found.scale_bytes // found.element_bytes
