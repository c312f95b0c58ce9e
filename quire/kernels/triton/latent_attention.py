"""Paged attention over latents in Triton: one row per token is key and value of all heads. It has
not run on a GPU yet.

The division into tiles and splits, and the arithmetic of the online softmax, are those of
`quire.kernels.triton.attention`. A row is loaded once: its first elements are the value and the
larger part of the key, and what is behind them, the rotated part, is a product of its own, so that
both have sizes that are powers of two (512 and 64 in DeepSeek's models).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionBatch
from quire.kernels.triton.attention import (
    LOG2_E,
    TileGrid,
    cached_rows,
    can_split,
    finished,
    heads_of_tile,
    merge,
    merge_splits,
    places_of,
    room_for_partials,
    seen_positions,
    softmax_weights,
    store_partial,
    store_rows,
    tile_queries,
    tile_rows,
)
from quire.kernels.triton.checks import check_attention, launch_options, require
from quire.kernels.triton.kv_rows import FLOAT_FORMAT, kernel_view, row_elements, row_scales
from quire.kernels.triton.tuning import AttentionTuning, Tuning

MAX_LATENT = 512
"""Elements of a value: those of a tile's outputs are held in registers."""
MAX_TAIL = 128
_KEYS_AT_ONCE = 32
"""Of rows as long as these: twice as many would take all of a program's shared memory."""


@triton.jit
def attend_latents(
    row_max, total, sums, queries, tails, cache, scales, table, places, first, end, factor,
    block_stride, HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax so far and BLOCK_N positions from `first` on; without IS_MASKED, all queries see
    all of them. Scores are multiplied by `factor`, to powers of two."""
    ROW_SIZE: tl.constexpr = HEAD_SIZE if FORMAT == FLOAT_FORMAT else HEAD_SIZE + 4
    TAIL_SIZE: tl.constexpr = HEAD_SIZE - VALUE_SIZE
    dims, tail_dims = tl.arange(0, queries.shape[1]), tl.arange(0, tails.shape[1])
    positions = first + tl.arange(0, BLOCK_N)
    is_there = positions < end
    rows = places_of(table, first, 0, end, block_stride, ROW_SIZE, BLOCK_SIZE, BLOCK_N)
    latents = row_elements(
        cached_rows(cache, rows, dims, is_there, VALUE_SIZE, IS_MASKED), queries.dtype, FORMAT
    )
    rotated = row_elements(
        cached_rows(cache + VALUE_SIZE, rows, tail_dims, is_there, TAIL_SIZE, IS_MASKED),
        queries.dtype,
        FORMAT,
    )
    scores = tl.dot(queries, tl.trans(latents), input_precision="ieee")
    scores = tl.dot(tails, tl.trans(rotated), scores, input_precision="ieee")
    if FORMAT != FLOAT_FORMAT:
        of_rows = row_scales(scales, rows, is_there, HEAD_SIZE, FORMAT)
        scores = scores * of_rows[None, :]
    if IS_MASKED:
        scores = tl.where(positions[None, :] <= places[:, None], scores, float("-inf"))
    top, weights, fade = softmax_weights(row_max, scores, factor)
    total = total * fade + tl.sum(weights, axis=1)
    if FORMAT != FLOAT_FORMAT:
        weights = weights * of_rows[None, :]
    sums = tl.dot(weights.to(latents.dtype), latents, sums * fade[:, None], input_precision="ieee")
    return top, total, sums


@triton.jit
def attend_split_of_latents(
    queries, tails, cache, scales, table, places, begin, clear_end, end, factor, block_stride,
    HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Online softmax over positions [begin, end): see `attention.attend_split`."""
    row_max = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    sums = tl.zeros([queries.shape[0], queries.shape[1]], tl.float32)
    for first in range(begin, clear_end, BLOCK_N):
        row_max, total, sums = attend_latents(
            row_max, total, sums, queries, tails, cache, scales, table, places, first, end, factor,
            block_stride, HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE, BLOCK_N, FORMAT, False,
        )  # fmt: skip
    for first in range(tl.maximum(begin, clear_end), end, BLOCK_N):
        row_max, total, sums = attend_latents(
            row_max, total, sums, queries, tails, cache, scales, table, places, first, end, factor,
            block_stride, HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE, BLOCK_N, FORMAT, True,
        )  # fmt: skip
    return row_max, total, sums


@triton.jit(do_not_specialize=["num_sequences", "num_splits", "table_stride"])
def latent_attention_kernel(
    query, cache, scales, out, partial_sums, partial_stats, query_start, context_len, block_tables,
    num_sequences, num_splits, query_stride, table_stride, block_stride, scale,
    NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr, TAIL_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_LEN: tl.constexpr, IS_PARTIAL: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, tiles of heads, splits (one unless IS_PARTIAL)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    sequence, start, query_len, first_query = tile_queries(
        query_start, num_sequences, tl.program_id(0), BLOCK_Q
    )
    if first_query >= query_len:
        return
    context = tl.load(context_len + sequence)
    token, places, lane, is_query = tile_rows(
        first_query, start, query_len, context, BLOCK_M, TILE_HEADS
    )
    head = tl.program_id(1) * TILE_HEADS + lane
    is_row = is_query & (head < NUM_HEADS)
    dims, tail_dims = tl.arange(0, VALUE_PADDED), tl.arange(0, TAIL_PADDED)
    is_element = is_row[:, None] & (dims < VALUE_SIZE)[None, :]
    is_tail = is_row[:, None] & (tail_dims < HEAD_SIZE - VALUE_SIZE)[None, :]
    of_rows = query + (token * query_stride + head * HEAD_SIZE)[:, None]
    queries = tl.load(of_rows + dims[None, :], mask=is_element, other=0.0)
    tails = tl.load(of_rows + VALUE_SIZE + tail_dims[None, :], mask=is_tail, other=0.0)
    _, _, clear_end, end = seen_positions(
        context - query_len + first_query, context, BLOCK_Q, BLOCK_N, WINDOW=0
    )
    table = block_tables + sequence.to(tl.int64) * table_stride
    factor = scale * LOG2_E
    where = token * NUM_HEADS + head
    if IS_PARTIAL:
        split = tl.program_id(2)
        split_end = tl.minimum(end, (split + 1) * SPLIT_LEN)
        row_max, total, sums = attend_split_of_latents(
            queries, tails, cache, scales, table, places, split * SPLIT_LEN,
            tl.minimum(clear_end, split_end), split_end, factor, block_stride, HEAD_SIZE,
            VALUE_SIZE, BLOCK_SIZE, BLOCK_N, FORMAT,
        )  # fmt: skip
        store_partial(
            partial_sums, partial_stats, where * num_splits + split, row_max, total, sums, is_row,
            is_element, split * SPLIT_LEN < split_end, dims, VALUE_SIZE,
        )  # fmt: skip
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, VALUE_PADDED], tl.float32)
        for split in range(0, (end + SPLIT_LEN - 1) // SPLIT_LEN):
            split_end = tl.minimum(end, (split + 1) * SPLIT_LEN)
            split_max, split_total, split_sums = attend_split_of_latents(
                queries, tails, cache, scales, table, places, split * SPLIT_LEN,
                tl.minimum(clear_end, split_end), split_end, factor, block_stride, HEAD_SIZE,
                VALUE_SIZE, BLOCK_SIZE, BLOCK_N, FORMAT,
            )  # fmt: skip
            row_max, total, sums = merge(row_max, total, sums, split_max, split_total, split_sums)
        result = finished(row_max, total, sums, out, head, is_row, HAS_SINKS=False)
        store_rows(out, where, result, is_element, dims, VALUE_SIZE)


def latent_attention(
    query: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    tuning: Tuning,
    *,
    scale: float,
    value_size: int,
    has_fp8: bool = False,
) -> Tensor:
    """Return what `Kernels.paged_attention` does of a cache whose rows are keys and values at once,
    with one KV head and without a window or a soft cap: [T, heads, value_size]."""
    tail_size = query.shape[2] - value_size
    require(
        1 <= value_size <= MAX_LATENT and 1 <= tail_size <= MAX_TAIL and cache.shape[1] == 1,
        f"latent attention: expected one head of up to {MAX_LATENT} values and 1 to {MAX_TAIL} "
        f"elements behind them, not of {value_size} and {tail_size}",
        cache,
    )
    check_attention(query, cache, cache, batch, None, None, scale, MAX_LATENT + MAX_TAIL)
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty(num_tokens, num_heads, value_size)
    if not num_tokens:
        return out
    figures = _figures(query, tuning)
    block_m = figures.low.block_m
    num_sequences = batch.context_len.numel()
    grid = TileGrid.of(query, num_sequences, 1, block_m)
    num_splits = triton.cdiv(batch.max_context_len, figures.split_len)
    is_partial = can_split(out, num_splits) and grid.leaves_idle(tuning)
    partials = room_for_partials(out, num_splits) if is_partial else (out, out)
    rows, scales, form = kernel_view(cache, has_fp8=has_fp8)
    latent_attention_kernel[(*grid, num_splits if is_partial else 1)](
        query, rows, scales, out, *partials, batch.query_start, batch.context_len,
        batch.block_tables, num_sequences, num_splits, query.stride(0),
        batch.block_tables.stride(0), rows.stride(0), scale, NUM_HEADS=num_heads,
        TILE_HEADS=heads_of_tile(num_heads, block_m), HEAD_SIZE=query.shape[2],
        VALUE_SIZE=value_size,
        VALUE_PADDED=max(16, triton.next_power_of_2(value_size)),
        TAIL_PADDED=max(16, triton.next_power_of_2(tail_size)), BLOCK_SIZE=rows.shape[2],
        BLOCK_M=block_m, BLOCK_N=min(figures.block_n, _KEYS_AT_ONCE), SPLIT_LEN=figures.split_len,
        IS_PARTIAL=is_partial, FORMAT=form,
        **launch_options(num_warps=figures.low.num_warps, num_stages=1),
    )  # fmt: skip
    if is_partial:
        merge_splits(out, partials, num_splits)
    return out


def _figures(query: Tensor, tuning: Tuning) -> AttentionTuning:
    return tuning.float_attention if query.dtype == torch.float32 else tuning.wide_attention
