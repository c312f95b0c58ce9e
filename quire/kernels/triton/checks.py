"""What stands between tensors and kernels: checks of shapes, dtypes and layouts from the host, and
the launch options.

Nothing is read back from the device: what a tensor holds (block ids, lengths) is the caller's
promise. A failed check is a bug of the caller's, hence TypeError and ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch
from quire.kernels.kv_cache import head_size_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
"""Formats of the KV cache that keep a scale for each row."""


def launch_options(num_warps: int, num_stages: int = 2) -> dict[str, object]:
    """Return options of every launch: multiplications and additions round one by one, so that an
    expression means the same bits in whichever kernel it stands. Matrix instructions are not
    concerned.
    """
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def num_warps_for(width: int) -> int:
    """Warps for a program that holds `width` elements of a row (a power of two):
    some 16 a thread."""
    return min(16, max(1, width // 512))


def require(condition: bool, message: str, *tensors: Tensor | None) -> None:
    """ValueError with `message` and the shapes of `tensors` unless `condition`."""
    if not condition:
        shapes = ", ".join(
            "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            for tensor in tensors
        )
        raise ValueError(f"{message}; got {shapes}" if shapes else message)


def check_floats(tensor: Tensor, name: str) -> None:
    """TypeError unless the kernels compute in the tensor's dtype;
    ValueError unless it is contiguous."""
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{name} is {tensor.dtype}; the Triton kernels take float32, bfloat16 and float16"
        )
    require(tensor.is_contiguous(), f"{name} is not contiguous", tensor)


def check_heads(tensor: Tensor, name: str) -> None:
    """Check as `check_floats` does, for [T, heads, D] of which the last two dimensions are
    contiguous."""
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{name} is {tensor.dtype}; the Triton kernels take float32, bfloat16 and float16"
        )
    is_packed = tensor.dim() == 3 and (tensor.shape[2] < 2 or tensor.stride(2) == 1)
    is_packed = is_packed and (tensor.shape[1] < 2 or tensor.stride(1) == tensor.shape[2])
    require(is_packed, f"{name}: expected [T, heads, D] with heads and elements contiguous", tensor)


def check_indices(tensor: Tensor, name: str, count: int) -> None:
    """TypeError or ValueError unless int64 [count]."""
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} is {tensor.dtype}; expected int64")
    require(
        tensor.shape == (count,) and tensor.is_contiguous(), f"{name}: expected [{count}]", tensor
    )


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """ValueError unless both are [B, KV heads, block size, row] and agree."""
    agree = (
        value_cache.shape == key_cache.shape
        and value_cache.dtype == key_cache.dtype
        and key_cache.dim() == 4
    )
    if key_cache.dtype not in (*FLOATS, *QUANTIZED):
        raise TypeError(
            f"a KV cache of {key_cache.dtype}; the Triton kernels take float32, bfloat16, "
            "float16, int8 and fp8"
        )
    if key_cache.dtype in QUANTIZED:
        require(
            key_cache.shape[-1] % 4 == 0,
            "rows of a quantized cache: expected a head size of whole fours",
            key_cache,
        )
    is_whole = key_cache.is_contiguous() and value_cache.is_contiguous()
    require(
        agree and is_whole,
        "expected two contiguous caches [B, KV heads, block size, D]",
        key_cache,
        value_cache,
    )
    require(
        key_cache.dim() == 4 and min(key_cache.shape[1:]) > 0,
        "the caches hold no positions",
        key_cache,
    )


def check_sinks(sinks: Tensor, query: Tensor) -> None:
    """ValueError or TypeError unless there is a score for each head."""
    check_floats(sinks, "sinks")
    require(sinks.shape == query.shape[1:2], "paged_attention: expected sinks [heads]", sinks)


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    max_head_size: int,
) -> None:
    """ValueError or TypeError unless the tensors fit together."""
    check_heads(query, "query")
    check_caches(key_cache, value_cache)
    num_heads, head_size = query.shape[1:]
    num_kv_heads, cache_head_size = key_cache.shape[1], head_size_of(key_cache)
    if key_cache.dtype in QUANTIZED and query.dtype is torch.float16:
        raise TypeError(
            "float16 queries of a quantized cache: its scales may be out of float16's range; "
            "use bfloat16"
        )
    if head_size != cache_head_size or num_heads % num_kv_heads or head_size > max_head_size:
        raise ValueError(
            f"paged_attention: query {list(query.shape)} does not fit a cache "
            f"{list(key_cache.shape)} "
            f"(heads must be a multiple of KV heads, and the head size at most {max_head_size})"
        )
    if (window is not None and window < 1) or (soft_cap is not None and not soft_cap > 0.0):
        raise ValueError(
            f"paged_attention: window={window} and soft_cap={soft_cap} must be above zero, or None"
        )
    require(scale > 0.0, f"paged_attention: scale={scale} must be above zero")
    num_sequences = batch.context_len.numel()
    vectors = (batch.query_start, batch.context_len, batch.block_tables)
    if any(tensor.dtype != torch.int32 for tensor in vectors):
        raise TypeError(
            "paged_attention: expected int32, got "
            f"{', '.join(str(tensor.dtype) for tensor in vectors)}"
        )
    require(
        batch.query_start.shape == (num_sequences + 1,)
        and batch.block_tables.dim() == 2
        and batch.block_tables.shape[0] == num_sequences
        and (batch.block_tables.shape[1] < 2 or batch.block_tables.stride(1) == 1),
        (
            "paged_attention: expected query_start [S + 1], context_len [S], block_tables [S, "
            "max blocks]"
        ),
        *vectors,
    )
