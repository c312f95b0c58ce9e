"""Paged attention of ragged batches in Triton: prefill chunks and decodes in one launch. It has not
run on a GPU yet.

A program computes a tile of rows, a row being one query of one head; the query heads that share a
KV head lie in the same tile. Keys come in tiles of `block_n` absolute positions, gathered through
the block table, so that the block size decides nothing; an online softmax (Milakov and Gimelshein,
arXiv:1805.02867; Dao et al., arXiv:2205.14135) runs over the tiles of a *split* of `split_len`
positions, and splits are merged in ascending order. What a row does not see changes nothing of it,
not even a bit: masked positions weigh zero, and merging with an empty split multiplies by one and
adds zero.

So the same numbers come out whether the splits of a row are computed by one program, one after the
other, or side by side by several (`IS_PARTIAL`) and merged by `merge_kernel`: which of the two runs
depends on how many programs there would be. And a run of sequences that share their first splits
(`SharedPrefixes`, aligned to splits) can be computed as one sequence over those, before each goes
on over its own: cascade attention, after Hydragen (Juravsky et al., arXiv:2402.05099), but with the
bits of attention without it.
A query that is not finite, or such keys, can reach rows of the same sequence in the same tile, none
of another sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.common.gpu_bounds import MAX_PARTIAL_BYTES
from quire.kernels.interface import AttentionBatch, SharedPrefixes
from quire.kernels.triton.checks import check_attention, check_sinks, launch_options
from quire.kernels.triton.kv_rows import FLOAT_FORMAT, kernel_view, row_elements, row_scales
from quire.kernels.triton.tuning import AttentionTuning, Tile, Tuning

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_HEAD_SIZE = 256
PROGRAMS_AT_ONCE = 2
"""Programs of attention that a multiprocessor holds, with low tiles:
80 KiB of shared memory each."""
_ALL, _BELOW, _FROM = 0, 1, 2


@triton.jit
def find_sequence(query_start, num_sequences, tile, BLOCK_Q: tl.constexpr):
    """The last sequence whose tiles begin at `tile` or before: those of sequence s begin at
    query_start[s] // BLOCK_Q + s.

    Each sequence has room for at least as many tiles as it needs, whatever the batch, so that the
    grid needs no list.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start + middle) // BLOCK_Q + middle
        is_before = begins <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def tile_queries(query_start, num_sequences, tile, BLOCK_Q: tl.constexpr):
    """The sequence of a tile, its first token, how many queries it has, and which of them is the
    tile's first: one behind the last where the tile has none."""
    sequence = find_sequence(query_start, num_sequences, tile, BLOCK_Q)
    start = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - start
    return sequence, start, query_len, (tile - (start // BLOCK_Q + sequence)) * BLOCK_Q


@triton.jit
def tile_rows(
    first_query, start, query_len, context, BLOCK_M: tl.constexpr, TILE_HEADS: tl.constexpr
):
    """Of each row of a tile [BLOCK_M], in which TILE_HEADS heads of a query are neighbours: its
    token, int64, and its position, its head among these, and whether there is such a query."""
    row = tl.arange(0, BLOCK_M)
    query_index = first_query + row // TILE_HEADS
    token = (start + query_index).to(tl.int64)
    return token, context - query_len + query_index, row % TILE_HEADS, query_index < query_len


@triton.jit
def seen_positions(
    first_place, context, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """What the BLOCK_Q queries from position `first_place` on see: `low` and `end`, the first
    position of any of them and the one behind the last; `begin`, where the tile of `low` begins;
    and `clear_end`: all of them see all of [begin, clear_end)."""
    end = tl.minimum(context, first_place + BLOCK_Q)
    low = 0
    begin = 0
    clear_end = (first_place + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        low = tl.maximum(first_place - WINDOW + 1, 0)
        begin = low // BLOCK_N * BLOCK_N
        clear_end = begin
    return low, begin, clear_end, end


@triton.jit
def softmax_weights(row_max, scores, factor):
    """The maxima [M] with scores [M, N] times `factor` among them, the weights [M, N] of the
    scores, and what the sums so far are multiplied by [M].

    exp2 takes the place of exp: its exponent is the score times `factor` minus the maximum, in one
    operation.
    """
    top = tl.maximum(row_max, tl.max(scores, axis=1) * factor)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(
        tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * factor, -base[:, None])
    )
    return top, weights, tl.exp2(row_max - base)


@triton.jit
def merge(row_max, total, sums, other_max, other_total, other_sums):
    """Two partial softmaxes to one: maxima and totals [M], sums [M, D].
    An empty one has row_max -inf and changes nothing."""
    top = tl.maximum(row_max, other_max)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(row_max - base)
    other_weight = tl.exp2(other_max - base)
    total = total * weight + other_total * other_weight
    sums = sums * weight[:, None] + other_sums * other_weight[:, None]
    return top, total, sums


@triton.jit
def finished(row_max, total, sums, sinks, head, is_row, HAS_SINKS: tl.constexpr):
    """The outputs of rows whose splits are all merged. With HAS_SINKS the score of each row's
    `head` joins its softmax here, once, as a split with a weight and no sums would."""
    if HAS_SINKS:
        score = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        top = tl.maximum(row_max, score)
        fade = tl.exp2(row_max - top)
        total = total * fade + tl.exp2(score - top)
        sums = sums * fade[:, None]
    total = tl.where(is_row, total, 1.0)
    return tl.div_rn(sums, tl.broadcast_to(total[:, None], sums.shape))


@triton.jit
def places_of(
    table,
    first,
    low,
    end,
    block_stride,
    ROW_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where the rows of positions [first, first + BLOCK_N) begin in a cache, int64 [BLOCK_N]; those
    below `low` and from `end` on in block 0.

    `first` is a multiple of BLOCK_N. Where tiles are whole blocks, a position's place in its block
    is the same in every tile.
    """
    steps = tl.arange(0, BLOCK_N)
    if BLOCK_N % BLOCK_SIZE == 0:
        columns = first // BLOCK_SIZE + steps // BLOCK_SIZE
        offsets = steps % BLOCK_SIZE
    else:
        columns = (first + steps) // BLOCK_SIZE
        offsets = (first + steps) % BLOCK_SIZE
    is_there = (first + steps >= low) & (first + steps < end)
    blocks = tl.load(table + columns, mask=is_there, other=0).to(tl.int64)
    return blocks * block_stride + offsets * ROW_SIZE


@triton.jit
def cached_rows(cache, rows, dims, is_there, HEAD_SIZE: tl.constexpr, IS_MASKED: tl.constexpr):
    """Rows [N, D] of a cache as they are stored; zero beyond HEAD_SIZE and, if IS_MASKED,
    where not `is_there`."""
    pointers = cache + rows[:, None] + dims[None, :]
    if IS_MASKED:
        found = tl.load(pointers, mask=is_there[:, None] & (dims < HEAD_SIZE)[None, :], other=0)
    elif dims.shape[0] == HEAD_SIZE:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=(dims < HEAD_SIZE)[None, :], other=0)
    return found


@triton.jit
def attend_tile(
    row_max, total, sums, queries, key_cache, value_cache, key_scales, value_scales, table, places,
    first, low, end, scale, soft_cap, block_stride, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, FORMAT: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax so far and BLOCK_N positions from `first` on. Without IS_MASKED, all queries see
    all of them; no query sees one below `low` or from `end` on, if it lies in the same tile: these
    are not read, since they may be another sequence's.
    """
    ROW_SIZE: tl.constexpr = HEAD_SIZE if FORMAT == FLOAT_FORMAT else HEAD_SIZE + 4
    dims = tl.arange(0, queries.shape[1])
    positions = first + tl.arange(0, BLOCK_N)
    is_there = (positions >= low) & (positions < end)
    rows = places_of(table, first, low, end, block_stride, ROW_SIZE, BLOCK_SIZE, BLOCK_N)
    keys = row_elements(
        cached_rows(key_cache, rows, dims, is_there, HEAD_SIZE, IS_MASKED), queries.dtype, FORMAT
    )
    values = row_elements(
        cached_rows(value_cache, rows, dims, is_there, HEAD_SIZE, IS_MASKED), queries.dtype, FORMAT
    )
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if FORMAT != FLOAT_FORMAT:
        scores = scores * row_scales(key_scales, rows, is_there, HEAD_SIZE, FORMAT)[None, :]
    factor = scale * LOG2_E
    if HAS_SOFT_CAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * factor / soft_cap)) + 1.0))
        factor = tl.full([], LOG2_E, tl.float32)
    if IS_MASKED:
        is_seen = positions[None, :] <= places[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (positions[None, :] > places[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
    top, weights, fade = softmax_weights(row_max, scores, factor)
    total = total * fade + tl.sum(weights, axis=1)
    if FORMAT != FLOAT_FORMAT:
        weights = weights * row_scales(value_scales, rows, is_there, HEAD_SIZE, FORMAT)[None, :]
    sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
    return top, total, sums


@triton.jit
def attend_split(
    queries, key_cache, value_cache, key_scales, value_scales, table, places, begin, clear_end, low,
    end, scale, soft_cap, block_stride, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Online softmax of queries [M, D] at absolute `places` [M] over positions [begin, end):
    row_max, total [M], sums [M, D].

    `begin` and `clear_end` are multiples of BLOCK_N; all queries see all positions in [begin,
    clear_end). Maxima are in units of log2. Scales of a quantized cache are applied to scores and
    to weights, so that its elements enter the products as they are, unrounded.
    """
    row_max = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    sums = tl.zeros([queries.shape[0], queries.shape[1]], tl.float32)
    for first in range(begin, clear_end, BLOCK_N):
        row_max, total, sums = attend_tile(
            row_max, total, sums, queries, key_cache, value_cache, key_scales, value_scales, table,
            places, first, low, end, scale, soft_cap, block_stride, HEAD_SIZE, BLOCK_SIZE, BLOCK_N,
            WINDOW, HAS_SOFT_CAP, FORMAT, False,
        )  # fmt: skip
    for first in range(tl.maximum(begin, clear_end), end, BLOCK_N):
        row_max, total, sums = attend_tile(
            row_max, total, sums, queries, key_cache, value_cache, key_scales, value_scales, table,
            places, first, low, end, scale, soft_cap, block_stride, HEAD_SIZE, BLOCK_SIZE, BLOCK_N,
            WINDOW, HAS_SOFT_CAP, FORMAT, True,
        )  # fmt: skip
    return row_max, total, sums


@triton.jit
def attend_splits(
    queries, key_cache, value_cache, key_scales, value_scales, table, places, begin, clear_end, low,
    end, scale, soft_cap, block_stride, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, FORMAT: tl.constexpr,
    SPLIT_LEN: tl.constexpr, HAS_ONE_SPLIT: tl.constexpr,
):  # fmt: skip
    """`attend_split` of all splits of [begin, end), one after the other and merged in ascending
    order."""
    if HAS_ONE_SPLIT:
        row_max, total, sums = attend_split(
            queries, key_cache, value_cache, key_scales, value_scales, table, places, begin,
            clear_end, low, end, scale, soft_cap, block_stride, HEAD_SIZE, BLOCK_SIZE, BLOCK_N,
            WINDOW, HAS_SOFT_CAP, FORMAT,
        )  # fmt: skip
    else:
        row_max = tl.full([queries.shape[0]], float("-inf"), tl.float32)
        total = tl.zeros([queries.shape[0]], tl.float32)
        sums = tl.zeros([queries.shape[0], queries.shape[1]], tl.float32)
        for split in range(begin // SPLIT_LEN, (end + SPLIT_LEN - 1) // SPLIT_LEN):
            split_end = tl.minimum(end, (split + 1) * SPLIT_LEN)
            split_max, split_total, split_sums = attend_split(
                queries, key_cache, value_cache, key_scales, value_scales, table, places,
                tl.maximum(begin, split * SPLIT_LEN), tl.minimum(clear_end, split_end), low,
                split_end, scale, soft_cap, block_stride, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, WINDOW,
                HAS_SOFT_CAP, FORMAT,
            )  # fmt: skip
            row_max, total, sums = merge(row_max, total, sums, split_max, split_total, split_sums)
    return row_max, total, sums


@triton.jit
def store_rows(out, where, rows, is_element, dims, HEAD_SIZE: tl.constexpr):
    """Stores rows [M, D] at rows `where` [M] of `out`, in its dtype."""
    pointers = out + where[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(pointers, rows.to(out.dtype.element_ty), mask=is_element)


@triton.jit
def store_partial(
    partial_sums, partial_stats, where, row_max, total, sums, is_row, is_element, is_filled, dims,
    HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """Stores the softmax of one split of rows [M] at `where` for `merge_kernel`; without its sums
    unless `is_filled`."""
    tl.store(partial_stats + where * 2, row_max, mask=is_row)
    tl.store(partial_stats + where * 2 + 1, total, mask=is_row)
    if is_filled:
        store_rows(partial_sums, where, sums, is_element, dims, HEAD_SIZE)


@triton.jit(do_not_specialize=["num_sequences", "num_splits", "table_stride"])
def attention_kernel(
    query, key_cache, value_cache, key_scales, value_scales, sinks, out, partial_sums,
    partial_stats, query_start, context_len, block_tables, bounds, num_sequences, num_splits,
    query_stride, table_stride, block_stride, head_stride, scale, soft_cap, NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT_LEN: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr, IS_PARTIAL: tl.constexpr, HAS_ONE_SPLIT: tl.constexpr,
    FORMAT: tl.constexpr, PART: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, KV heads times tiles of their group, splits (one unless IS_PARTIAL).

    PART: splits below the sequence's position in `bounds` (1), those from there on (2), or all (0).
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    sequence, start, query_len, first_query = tile_queries(
        query_start, num_sequences, tl.program_id(0), BLOCK_Q
    )
    if first_query >= query_len:
        return
    if PART > 0:
        is_below = tl.program_id(2) * SPLIT_LEN < tl.load(bounds + sequence)
        if is_below != (PART == 1):
            return
    context = tl.load(context_len + sequence)
    token, places, lane, is_query = tile_rows(
        first_query, start, query_len, context, BLOCK_M, TILE_HEADS
    )
    kv_head = tl.program_id(1) // HEAD_TILES
    head_in_group = (tl.program_id(1) % HEAD_TILES) * TILE_HEADS + lane
    is_row = is_query & (head_in_group < GROUP)
    head = kv_head * GROUP + head_in_group
    dims = tl.arange(0, HEAD_PADDED)
    is_element = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    of_rows = query + (token * query_stride + head * HEAD_SIZE)[:, None]
    queries = tl.load(of_rows + dims[None, :], mask=is_element, other=0.0)
    low, begin, clear_end, end = seen_positions(
        context - query_len + first_query, context, BLOCK_Q, BLOCK_N, WINDOW
    )
    if IS_PARTIAL:
        begin = tl.maximum(begin, tl.program_id(2) * SPLIT_LEN)
        end = tl.minimum(end, (tl.program_id(2) + 1) * SPLIT_LEN)
        clear_end = tl.minimum(clear_end, end)
    row_max, total, sums = attend_splits(
        queries, key_cache + kv_head * head_stride, value_cache + kv_head * head_stride,
        key_scales + kv_head * head_stride // 4, value_scales + kv_head * head_stride // 4,
        block_tables + sequence.to(tl.int64) * table_stride, places, begin, clear_end, low, end,
        scale, soft_cap, block_stride, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFT_CAP, FORMAT,
        SPLIT_LEN, IS_PARTIAL or HAS_ONE_SPLIT,
    )  # fmt: skip
    where = token * NUM_HEADS + head
    if IS_PARTIAL:
        store_partial(
            partial_sums, partial_stats, where * num_splits + tl.program_id(2), row_max, total,
            sums, is_row, is_element, begin < end, dims, HEAD_SIZE,
        )  # fmt: skip
    else:
        result = finished(row_max, total, sums, sinks, head, is_row, HAS_SINKS)
        store_rows(out, where, result, is_element, dims, HEAD_SIZE)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_kernel(
    partial_sums, partial_stats, sinks, out, num_rows, num_splits, NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the splits of BLOCK_M rows, a row being a token's head, in ascending order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    dims = tl.arange(0, HEAD_PADDED)
    is_element = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    for split in range(0, num_splits):
        where = row * num_splits + split
        split_max = tl.load(partial_stats + where * 2, mask=is_row, other=float("-inf"))
        split_total = tl.load(partial_stats + where * 2 + 1, mask=is_row, other=0.0)
        is_filled = is_element & (split_max != float("-inf"))[:, None]  # NaN counts as filled
        split_sums = tl.load(
            partial_sums + where[:, None] * HEAD_SIZE + dims[None, :], mask=is_filled, other=0.0
        )
        row_max, total, sums = merge(row_max, total, sums, split_max, split_total, split_sums)
    head = (row % NUM_HEADS).to(tl.int32)
    result = finished(row_max, total, sums, sinks, head, is_row, HAS_SINKS)
    store_rows(out, row, result, is_element, dims, HEAD_SIZE)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    tuning: Tuning,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    has_fp8: bool = False,
) -> Tensor:
    """See `Kernels.paged_attention`. Head sizes up to 256; any block size; the cache may be of
    another dtype.

    `has_fp8`: the device has instructions for e4m3.
    """
    check_attention(query, key_cache, value_cache, batch, window, soft_cap, scale, MAX_HEAD_SIZE)
    if sinks is not None:
        check_sinks(sinks, query)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not query.shape[0]:
        return out
    launch = _Launch(
        query, key_cache, value_cache, out, tuning, scale, window, soft_cap, sinks, has_fp8
    )
    num_splits = triton.cdiv(batch.max_context_len, launch.figures.split_len)
    can_be_apart = can_split(query, num_splits)
    # A batch with very many new tokens shares the reading of a prefix anyway, among those of one
    # sequence.
    shared = batch.shared if window is None and can_be_apart else None
    is_idle = launch.grid(batch.context_len.numel()).leaves_idle(tuning)
    if can_be_apart and (shared is not None or is_idle):
        partials = room_for_partials(query, num_splits)
        if shared is None:
            launch(batch, num_splits, partials)
        else:
            launch(shared, num_splits, partials, (shared.shared_len, _BELOW))
            launch(batch, num_splits, partials, (shared.known_len, _FROM))
        merge_splits(out, partials, num_splits, sinks)
    else:
        launch(batch, num_splits)
    return out


class TileGrid(NamedTuple):
    """The programs of a launch without parallel splits."""

    num_tiles: int
    num_head_tiles: int
    """KV heads times tiles of their group."""

    @classmethod
    def of(cls, query: Tensor, num_sequences: int, num_kv_heads: int, block_m: int) -> Self:
        """Divide query [T, heads, D] into tiles of `block_m` rows: positions, and `tile_heads`."""
        num_tokens, num_heads, _ = query.shape
        group = num_heads // num_kv_heads
        tile_heads = heads_of_tile(group, block_m)
        return cls(
            num_tokens // (block_m // tile_heads) + num_sequences,
            num_kv_heads * triton.cdiv(group, tile_heads),
        )

    def leaves_idle(self, tuning: Tuning) -> bool:
        """Whether the device has room for splits beside one another."""
        return self.num_tiles * self.num_head_tiles < PROGRAMS_AT_ONCE * tuning.num_programs


def heads_of_tile(group: int, block_m: int) -> int:
    """Return the query heads in a tile: those of a group, as far as they fit."""
    return min(triton.next_power_of_2(group), block_m)


def can_split(out: Tensor, num_splits: int) -> bool:
    """Whether there are splits, and room for the partial results of all rows [T, heads, D]."""
    return num_splits > 1 and partial_bytes(out, num_splits) <= MAX_PARTIAL_BYTES


@dataclass(frozen=True, slots=True)
class _Launch:
    """`attention_kernel` with all that does not change between the launches of one call."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    out: Tensor
    tuning: Tuning
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    has_fp8: bool

    @property
    def figures(self) -> AttentionTuning:
        if self.query.dtype == torch.float32:
            return self.tuning.float_attention
        return self.tuning.wide_attention if self.query.shape[2] > 128 else self.tuning.attention

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.key_cache.shape[1]

    def tile(self, num_sequences: int) -> Tile:
        """Return a tall one where sequences, on average, have the rows to fill it:
        what is computed of a row is the same in both."""
        tall, num_rows = self.figures.tall, self.query.shape[0] * triton.next_power_of_2(self.group)
        return tall if num_rows >= num_sequences * tall.block_m else self.figures.low

    def grid(self, num_sequences: int) -> TileGrid:
        block_m = self.tile(num_sequences).block_m
        return TileGrid.of(self.query, num_sequences, self.key_cache.shape[1], block_m)

    def __call__(
        self,
        batch: AttentionBatch | SharedPrefixes,
        num_splits: int,
        partials: tuple[Tensor, Tensor] | None = None,
        part: tuple[Tensor, int] | None = None,
    ) -> None:
        """Results to `out`, or of each split to `partials`; of a part of the splits,
        given bounds."""
        query, figures, num_sequences = self.query, self.figures, batch.context_len.numel()
        tile = self.tile(num_sequences)
        num_heads, head_size = query.shape[1:]
        bounds, which = (batch.context_len, _ALL) if part is None else part
        (keys, key_scales, form), (values, value_scales, _) = (
            kernel_view(cache, has_fp8=self.has_fp8) for cache in (self.key_cache, self.value_cache)
        )
        attention_kernel[(*self.grid(num_sequences), 1 if partials is None else num_splits)](
            query, keys, values, key_scales, value_scales,
            query if self.sinks is None else self.sinks, self.out,
            *(partials or (self.out, self.out)), batch.query_start, batch.context_len,
            batch.block_tables, bounds, num_sequences, num_splits, query.stride(0),
            batch.block_tables.stride(0), keys.stride(0), keys.stride(1), self.scale,
            self.soft_cap or 0.0, NUM_HEADS=num_heads, GROUP=self.group,
            TILE_HEADS=heads_of_tile(self.group, tile.block_m), HEAD_SIZE=head_size,
            HEAD_PADDED=max(16, triton.next_power_of_2(head_size)), BLOCK_SIZE=keys.shape[2],
            BLOCK_M=tile.block_m, BLOCK_N=figures.block_n, SPLIT_LEN=figures.split_len,
            WINDOW=self.window or 0, HAS_SOFT_CAP=self.soft_cap is not None,
            IS_PARTIAL=partials is not None, HAS_ONE_SPLIT=num_splits == 1, FORMAT=form, PART=which,
            HAS_SINKS=self.sinks is not None,
            **launch_options(num_warps=tile.num_warps, num_stages=figures.num_stages),
        )  # fmt: skip


def shared_prefix_unit(tuning: Tuning) -> int:
    """See `Kernels.shared_prefix_unit`: whole splits of whichever figures a layer has."""
    return math.lcm(
        *(
            each.split_len
            for each in (tuning.attention, tuning.wide_attention, tuning.float_attention)
        )
    )


def partial_bytes(query: Tensor, num_splits: int) -> int:
    """Return the bytes that `room_for_partials` takes."""
    num_tokens, num_heads, head_size = query.shape
    return num_tokens * num_heads * num_splits * (head_size + 2) * 4


def room_for_partials(query: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Room for every row's splits: sums [T, heads, splits, D], maxima and totals [T, heads, splits,
    2]."""
    num_tokens, num_heads, head_size = query.shape
    shape = (num_tokens, num_heads, num_splits, head_size)
    sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    return sums, torch.empty((*shape[:3], 2), dtype=torch.float32, device=query.device)


def merge_splits(
    out: Tensor, partials: tuple[Tensor, Tensor], num_splits: int, sinks: Tensor | None = None
) -> None:
    """Merge the splits of every row into out [T, heads, D]."""
    num_rows, head_size = out.shape[0] * out.shape[1], out.shape[2]
    block_m = 4
    merge_kernel[(triton.cdiv(num_rows, block_m),)](
        *partials, out if sinks is None else sinks, out, num_rows, num_splits,
        NUM_HEADS=out.shape[1], HEAD_SIZE=head_size,
        HEAD_PADDED=max(16, triton.next_power_of_2(head_size)), BLOCK_M=block_m,
        HAS_SINKS=sinks is not None, **launch_options(num_warps=4),
    )  # fmt: skip
