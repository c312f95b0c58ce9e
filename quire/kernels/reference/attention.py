"""Reference paged attention and cache movement: gather a sequence's keys and values,
then plain softmax, row by row."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch
from quire.kernels.kv_cache import head_size_of

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST_SCALE = 2.0**-126
"""The least normal float32, so that a row of zeros divides by something."""


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Scatter [T, KV heads, D] into caches [B, KV heads, block size, row]."""
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    pairs = [(key, key_cache)] + [(value, value_cache)] * (value_cache is not key_cache)
    for rows, cache in pairs:
        _raw(cache)[blocks, :, offsets] = _raw(_stored(rows, cache.dtype))


def _stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [..., D] as a cache of `dtype` keeps them."""
    largest = LARGEST.get(dtype)
    if largest is None:
        return rows.to(dtype)
    x = rows.float()
    scale = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=_LEAST_SCALE)
    scaled = x / scale
    elements = (
        scaled.round().to(torch.int8) if dtype is torch.int8 else scaled.to(dtype).view(torch.int8)
    )
    return torch.cat([elements, scale.view(torch.int8)], dim=-1).view(dtype)


def _loaded(stored: Tensor) -> Tensor:
    """Return what stored rows count as, float32 [..., D]."""
    if stored.dtype not in LARGEST:
        return stored.float()
    head_size = head_size_of(stored)
    elements, scale = (
        stored[..., :head_size].contiguous(),
        stored.view(torch.int8)[..., head_size:].contiguous(),
    )
    return elements.float() * scale.view(torch.float32)


def _raw(cache: Tensor) -> Tensor:
    """fp8 as bytes: torch does not index it."""
    return cache.view(torch.int8) if cache.dtype is torch.float8_e4m3fn else cache


def copy_blocks(caches: list[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """Advanced indexing copies the sources out first, so chains of copies read the old contents."""
    for cache in map(_raw, caches):
        cache[destinations] = cache[sources]


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
    """Attend with one query row at a time over the keys it can see,
    so nothing else in the batch can reach its arithmetic."""
    out = query.new_empty(*query.shape[:2], value_size or query.shape[2])
    query_start, context_len = batch.query_start.tolist(), batch.context_len.tolist()
    for index, context in enumerate(context_len):
        start, end = query_start[index], query_start[index + 1]
        table = batch.block_tables[index]
        keys, values = _gather(key_cache, table, context), _gather(value_cache, table, context)
        values = values[..., : out.shape[2]]
        for row in range(start, end):
            last = context - (end - row)  # this row's own position
            first = 0 if window is None else max(0, last - window + 1)
            seen = slice(first, last + 1 if key_ends is None else int(key_ends[row]))
            out[row] = _attend(
                query[row].float(), keys[:, seen], values[:, seen], scale, soft_cap, sinks
            ).to(out.dtype)
    return out


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
    """One sequence at a time, so nothing else in the batch can reach its arithmetic."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    query_start = batch.query_start.tolist()
    group = query.shape[1] // key.shape[1]
    contexts = batch.context_len.tolist()
    for (start, end), context in zip(itertools.pairwise(query_start), contexts, strict=True):
        rows, seen = slice(start, end), slice(start, start + context)
        keys, values = (
            each[seen].float().repeat_interleave(group, 1).transpose(0, 1) for each in (key, value)
        )
        scores = query[rows].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        positions = torch.arange(end - start, device=query.device)
        distances = positions[None, :context] - positions[:, None]
        if bias is not None:
            scores += bias[:, distances + bias.shape[1] // 2]
        if window is not None:
            scores = scores.masked_fill(distances.abs() >= window, -torch.inf)
        out[rows] = (torch.softmax(scores, -1) @ values).transpose(0, 1).to(out.dtype)
    return out


def _gather(cache: Tensor, table: Tensor, context: int) -> Tensor:
    """Return a sequence's cache as float32 [KV heads, context, D], arbitrary behind a window."""
    block_size = cache.shape[2]
    blocks = table[: -(-context // block_size)].long().clamp(min=0)
    rows = _raw(cache)[blocks].transpose(0, 1).flatten(1, 2)[:, :context].contiguous()
    return _loaded(rows.view(cache.dtype))


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Query [heads, D] against keys and values [KV heads, n, D],
    each KV head serving heads / KV heads query heads."""
    grouped = query.view(keys.shape[0], -1, query.shape[-1])
    scores = (grouped.unsqueeze(2) * keys.unsqueeze(1)).sum(-1) * scale  # [KV heads, group, n]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(*scores.shape[:2], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return (weights.unsqueeze(-1) * values.unsqueeze(1)).sum(2).flatten(0, 1)
