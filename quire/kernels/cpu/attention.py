"""Paged attention and cache movement on the CPU: checks, and calls into the extension.

The cache may hold any of its formats beside float32 or bfloat16 activations: values are converted
on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu import _native
from quire.kernels.cpu.checks import (
    address,
    float_code,
    heads_address,
    indices_address,
    int32_address,
    require,
    vector_address,
)
from quire.kernels.interface import AttentionBatch
from quire.kernels.kv_cache import head_size_of

MAX_HEAD_SIZE = 576
KV_FORMAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """See `Kernels.write_kv`; key and value may be views whose last two
    dimensions are contiguous."""
    key_data, value_data = heads_address(key, "key"), heads_address(value, "value")
    num_blocks, num_kv_heads, block_size, head_size = _cache_shape(key_cache, value_cache)
    num_tokens = key.shape[0]
    if (
        key.shape != (num_tokens, num_kv_heads, head_size)
        or value.shape != key.shape
        or value.dtype != key.dtype
    ):
        raise ValueError(
            f"write_kv: key {key.dtype} {list(key.shape)} and value {value.dtype} "
            f"{list(value.shape)} do not fit "
            f"a cache {list(key_cache.shape)}"
        )
    _native.write_kv(
        key_data,
        value_data,
        address(key_cache, "key_cache"),
        address(value_cache, "value_cache"),
        indices_address(slots, "slots", num_tokens),
        float_code(key, "key"),
        KV_FORMAT_CODES[key_cache.dtype],
        num_tokens,
        key.stride(0),
        value.stride(0),
        num_kv_heads,
        head_size,
        num_blocks,
        block_size,
    )


def copy_blocks(caches: list[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """See `Kernels.copy_blocks`; any dtype, destinations distinct."""
    count = sources.numel()
    source_data = indices_address(sources, "sources", count)
    destination_data = indices_address(destinations, "destinations", count)
    for cache in caches:
        require(cache.dim() >= 1, "copy_blocks: expected caches [B, ...]", cache)
        num_blocks = cache.shape[0]
        block_bytes = cache.nbytes // max(num_blocks, 1)
        _native.copy_blocks(
            address(cache, "cache"), num_blocks, block_bytes, source_data, destination_data, count
        )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    value_size: int | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """See `Kernels.paged_attention`; the query may be a view whose last two
    dimensions are contiguous."""
    query_data = heads_address(query, "query")
    num_tokens, num_heads, head_size = query.shape
    num_blocks, num_kv_heads, block_size, _ = shape = _cache_shape(key_cache, value_cache)
    _check_paged(query, shape, window, soft_cap)
    num_sequences = check_batch(batch)
    wide_sinks = None if sinks is None else native_sinks(sinks, num_heads)
    value_size = head_size if value_size is None else value_size
    out = torch.empty((num_tokens, num_heads, value_size), dtype=query.dtype)
    _native.paged_attention(
        query_data,
        out.data_ptr(),
        float_code(query, "query"),
        address(key_cache, "key_cache"),
        address(value_cache, "value_cache"),
        KV_FORMAT_CODES[key_cache.dtype],
        num_tokens,
        query.stride(0),
        num_heads,
        num_kv_heads,
        head_size,
        num_blocks,
        block_size,
        int32_address(batch.query_start, "query_start"),
        int32_address(batch.context_len, "context_len"),
        num_sequences,
        int32_address(batch.block_tables, "block_tables"),
        batch.block_tables.shape[1],
        scale,
        window or 0,
        soft_cap or 0.0,
        0 if wide_sinks is None else address(wide_sinks, "sinks"),
        value_size,
        0 if key_ends is None else vector_address(key_ends, "key_ends", torch.int32, num_tokens),
    )
    return out


def _check_paged(
    query: Tensor,
    cache_shape: tuple[int, int, int, int],
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Refuse a query that does not fit the cache, and limits of attention that are none."""
    _, num_heads, head_size = query.shape
    _, num_kv_heads, _, cache_head_size = cache_shape
    if (
        head_size != cache_head_size
        or num_kv_heads == 0
        or num_heads % num_kv_heads
        or head_size > MAX_HEAD_SIZE
    ):
        raise ValueError(
            f"paged_attention: query {list(query.shape)} does not fit a cache of "
            f"{num_kv_heads} KV heads of {cache_head_size} elements "
            f"(heads must be a multiple of KV heads, and the head size at most {MAX_HEAD_SIZE})"
        )
    if (window is not None and window < 1) or (soft_cap is not None and not soft_cap > 0.0):
        raise ValueError(
            f"paged_attention: window={window} and soft_cap={soft_cap} must be above zero, or None"
        )


def native_sinks(sinks: Tensor, num_heads: int) -> Tensor:
    """Return sinks as the extension takes them, float32 [heads]; the caller keeps them alive."""
    require(sinks.shape == (num_heads,), f"attention: expected sinks [{num_heads}]", sinks)
    return sinks.float().contiguous()


def bidirectional_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See `Kernels.bidirectional_attention`."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, stride = key.shape[1], query.stride(0)
    if key.shape != value.shape or key.shape != (num_tokens, num_kv_heads, head_size):
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} do not fit the query"
        )
    if num_tokens > 1 and (key.stride(0), value.stride(0)) != (stride, stride):
        raise ValueError("query, key and value are not rows of one tensor")
    num_sequences = check_batch(batch)
    out = torch.empty((num_tokens, num_heads, head_size), dtype=query.dtype)
    _native.bidirectional_attention(
        heads_address(query, "query"),
        heads_address(key, "key"),
        heads_address(value, "value"),
        out.data_ptr(),
        float_code(query, "query"),
        num_tokens,
        stride,
        num_heads,
        num_kv_heads,
        head_size,
        int32_address(batch.query_start, "query_start"),
        int32_address(batch.context_len, "context_len"),
        num_sequences,
        scale,
        window or 0,
        0 if bias is None else bias_address(bias, num_heads),
        0 if bias is None else bias.shape[1] // 2,
    )
    return out


def bias_address(bias: Tensor, num_heads: int) -> int:
    """Of a table of biases by relative position."""
    is_table = bias.dtype == torch.float32 and bias.dim() == 2 and bias.shape[1] % 2 == 1
    require(
        is_table and bias.shape[0] == num_heads, "expected a bias float32 [heads, 2 * P - 1]", bias
    )
    return address(bias, "bias")


def _cache_shape(key_cache: Tensor, value_cache: Tensor) -> tuple[int, int, int, int]:
    """(B, KV heads, block size, D) of two caches that agree."""
    if (
        key_cache.dim() != 4
        or value_cache.shape != key_cache.shape
        or value_cache.dtype != key_cache.dtype
    ):
        raise ValueError(
            f"caches are {key_cache.dtype} {list(key_cache.shape)} and {value_cache.dtype} "
            f"{list(value_cache.shape)}; expected [B, KV heads, block size, row] twice"
        )
    num_blocks, num_kv_heads, block_size, _ = key_cache.shape
    head_size = head_size_of(key_cache)
    if block_size < 1 or head_size < 1:
        raise ValueError(f"caches {list(key_cache.shape)} hold no positions")
    return num_blocks, num_kv_heads, block_size, head_size


def native_cache(key_cache: Tensor, value_cache: Tensor) -> _native.KVCache:
    """Return one layer's cache as native callers take it; it keeps nothing alive."""
    num_blocks, num_kv_heads, block_size, head_size = _cache_shape(key_cache, value_cache)
    return _native.KVCache(
        keys=address(key_cache, "key_cache"),
        values=address(value_cache, "value_cache"),
        format=KV_FORMAT_CODES[key_cache.dtype],
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_size=head_size,
    )


def check_batch(batch: AttentionBatch) -> int:
    """Return the number of sequences; the extension checks the contents."""
    num_sequences = batch.context_len.numel()
    require(
        batch.context_len.dim() == 1
        and batch.query_start.shape == (num_sequences + 1,)
        and batch.block_tables.dim() == 2
        and batch.block_tables.shape[0] == num_sequences,
        (
            "paged_attention: expected query_start [S + 1], context_len [S], block_tables [S, "
            "max blocks]"
        ),
        batch.query_start,
        batch.context_len,
        batch.block_tables,
    )
    return num_sequences
