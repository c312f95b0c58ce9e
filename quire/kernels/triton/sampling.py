"""Sampling in Triton, to the reference's bits: `SamplingKernels` for logits on a GPU. It has not
run on a GPU yet.

Owns draws, scores, penalties and top-k alternatives. Filter thresholds are found by
`threshold_search`, and so are the alternatives, which are what a top-k would keep; only they are
sorted. To draw and to score, several programs share a row. What they bring together are integers
(weights, and tokens in the order of their scores), so nothing depends on how a row is split into
chunks. It never judges logits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling import (
    TOKEN_STREAM,
    Filters,
    Keys,
    Penalties,
    ScaledRows,
    Scores,
    Thresholds,
)
from quire.kernels.triton.checks import launch_options
from quire.kernels.triton.noise import gumbel, philox, weigh
from quire.kernels.triton.row_argmax import argmax_of_rows
from quire.kernels.triton.threshold_search import (
    ID_BITS,
    NO_PLACE,
    append,
    find_thresholds,
    id_at,
    key_of,
    place_of,
    spread,
)

_BLOCK = 2048
_DRAW_BLOCK = 512
"""Counters, each of which makes the noise of four tokens."""
_NUM_WARPS = 8
_MAX_TOP = 1024
"""More alternatives than this (the whole vocabulary, say) are sorted with all others."""
_LEAST_WIDTH = 32
"""Alternatives that a program orders at least:
one compiled kernel for all the usual numbers of them."""
_SEEN = tl.constexpr(1 << 30)
_COUNT_ELEMENTS = 1 << 25
"""Counts of penalised tokens held at once: 128 MiB."""


@triton.jit
def is_kept(x, ids, value, last_id):
    """Test which tokens pass the filter threshold."""
    return ((x > value) | ((x == value) & (ids <= last_id))) & (x > float("-inf"))


@triton.jit(do_not_specialize=["count"])
def collect_kernel(
    logits, row, threshold_value, threshold_id, counters, places, size, count, BLOCK: tl.constexpr
):
    """Append the sort keys of a chunk's tokens that pass the threshold of query program_id(0)."""
    query = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(row + query) * size + ids, mask=ids < size, other=float("-inf"))
    is_best = is_kept(x, ids, tl.load(threshold_value + query), tl.load(threshold_id + query))
    append(place_of(key_of(x), ids), is_best, places + query * count, counters + query, count)


@triton.jit(do_not_specialize=["count"])
def order_kernel(
    logits, row, counters, places, found, size, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the top-k token ids of query program_id(0), best first, padded with the lowest ids
    whose logit is -inf."""
    query = tl.program_id(0)
    line = logits + tl.load(row + query) * size
    # more only in rows that are not finite
    num_found = tl.minimum(tl.load(counters + query), count).to(tl.int32)
    number = tl.arange(0, WIDTH)
    own = tl.load(places + query * count + number, mask=number < num_found, other=0)
    num_better = tl.zeros([WIDTH], tl.int32)
    for i in range(0, num_found):
        num_better += (tl.load(places + query * count + i) < own).to(tl.int32)
    tl.store(found + query * count + num_better, id_at(own), mask=number < num_found)
    first = 0
    while (num_found < count) & (first < size):
        ids = first + tl.arange(0, BLOCK)
        is_empty = tl.load(line + ids, mask=ids < size, other=0.0) == float("-inf")
        slots = num_found + tl.cumsum(is_empty.to(tl.int32), axis=0) - 1
        tl.store(found + query * count + slots, ids.to(tl.int64), mask=is_empty & (slots < count))
        num_found += tl.sum(is_empty.to(tl.int32), axis=0)
        first += BLOCK


@triton.jit(do_not_specialize=["num_blocks"])
def draw_kernel(
    logits, row, max_logits, scales, threshold_value, threshold_id, seeds, positions, best_places,
    size, num_blocks, STREAM: tl.constexpr, IS_FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The place of the best token of chunk program_id(1), with its noise,
    of query program_id(0)."""
    query, begin = tl.program_id(0), tl.program_id(1) * num_blocks * BLOCK
    line = logits + tl.load(row + query) * size
    max_logit, scale = tl.load(max_logits + query), tl.load(scales + query)
    seed, position = tl.load(seeds + query), tl.load(positions + query)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    value, last_id = 0.0, tl.zeros([], tl.int64)
    if IS_FILTERED:
        value, last_id = tl.load(threshold_value + query), tl.load(threshold_id + query)
    best = tl.full([BLOCK], NO_PLACE, tl.int64)
    zeros = tl.zeros([BLOCK], tl.uint32)
    c1 = zeros + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zeros + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for first in range(begin, tl.minimum(begin + num_blocks * BLOCK, tl.cdiv(size, 4)), BLOCK):
        counter = first + tl.arange(0, BLOCK)
        words = philox(counter.to(tl.uint32), c1, c2, zeros + STREAM, k0, k1)
        for j in tl.static_range(4):
            ids = counter * 4 + j
            x = tl.load(line + ids, mask=ids < size, other=float("-inf"))
            score = (x - max_logit) * scale + gumbel(words[j])
            if IS_FILTERED:
                score = tl.where(is_kept(x, ids, value, last_id), score, float("-inf"))
            is_number = (ids < size) & (score == score)
            best = tl.minimum(best, tl.where(is_number, place_of(key_of(score), ids), NO_PLACE))
    tl.store(best_places + query * tl.num_programs(1) + tl.program_id(1), tl.min(best, axis=0))


@triton.jit(do_not_specialize=["num_blocks"])
def score_kernel(
    logits, row, max_logits, scales, threshold_value, threshold_id, token_ids, totals, ranks, size,
    num_blocks, IS_FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds chunk program_id(1) of query program_id(0): to its total weight,
    and to the rank of one of its tokens."""
    query, begin = tl.program_id(0), tl.program_id(1) * num_blocks * BLOCK
    line = logits + tl.load(row + query) * size
    max_logit, scale = tl.load(max_logits + query), tl.load(scales + query)
    own = tl.load(line + tl.load(token_ids + query))
    value, last_id = 0.0, tl.zeros([], tl.int64)
    if IS_FILTERED:
        value, last_id = tl.load(threshold_value + query), tl.load(threshold_id + query)
    total = tl.zeros([BLOCK], tl.int64)
    num_better = tl.zeros([BLOCK], tl.int64)
    for first in range(begin, tl.minimum(begin + num_blocks * BLOCK, size), BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < size, other=float("-inf"))
        is_in = x > float("-inf")
        if IS_FILTERED:
            is_in = is_kept(x, ids, value, last_id)
        total += tl.where(is_in, weigh((x - max_logit) * scale), 0)
        num_better += (x > own).to(tl.int64)
    tl.atomic_add(totals + query, tl.sum(total, axis=0), sem="relaxed")
    tl.atomic_add(ranks + query, tl.sum(num_better, axis=0), sem="relaxed")


@triton.jit
def count_kernel(token_ids, starts, output_starts, counts, size, BLOCK: tl.constexpr):
    """Counts the output's tokens of query program_id(0) into counts [n, V],
    and marks all its tokens with _SEEN."""
    query = tl.program_id(0)
    begin, end, output = (
        tl.load(starts + query),
        tl.load(starts + query + 1),
        tl.load(output_starts + query),
    )
    line = counts + query.to(tl.int64) * size
    for first in range(begin, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        token = tl.load(token_ids + places, mask=places < end, other=-1)
        is_known = (token >= 0) & (token < size)
        tl.atomic_or(line + token, _SEEN, mask=is_known)
        tl.atomic_add(line + token, 1, mask=is_known & (places >= output))


@triton.jit
def penalise_kernel(
    logits, row, counts, repetitions, frequencies, presences, size, BLOCK: tl.constexpr
):
    """Penalises a chunk of query program_id(0) by its counts."""
    query = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = logits + tl.load(row + query) * size + ids
    held = tl.load(counts + query.to(tl.int64) * size + ids, mask=ids < size, other=0)
    x = tl.load(there, mask=ids < size, other=0.0)
    repetition = tl.zeros([BLOCK], tl.float32) + tl.load(repetitions + query)
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    count = (held & (_SEEN - 1)).to(tl.float32)
    less = (y - tl.load(frequencies + query) * count) - tl.load(presences + query)
    tl.store(there, tl.where(count > 0, less, y), mask=(ids < size) & (held != 0))


class TritonSampling:
    """`SamplingKernels` for float32 logits on a GPU. Holds no state."""

    name = "triton"

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return argmax_of_rows(_checked(logits), None)

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        size, num_rows = _checked(logits).shape[1], penalties.row.numel()
        at_once = max(1, _COUNT_ELEMENTS // size)
        for first in range(0, num_rows, at_once):
            rows = slice(first, first + at_once)
            count = min(num_rows, first + at_once) - first
            counts = torch.zeros((count, size), dtype=torch.int32, device=logits.device)
            starts = penalties.start[first : first + count + 1]
            count_kernel[(count,)](
                penalties.token_ids,
                starts,
                penalties.output_start[rows],
                counts,
                size,
                BLOCK=_BLOCK,
                **_options(),
            )
            penalise_kernel[(count, triton.cdiv(size, _BLOCK))](
                logits, penalties.row[rows], counts, penalties.repetition[rows],
                penalties.frequency[rows],
                penalties.presence[rows], size, BLOCK=_BLOCK, **_options(),
            )  # fmt: skip

    def thresholds(self, logits: Tensor, rows: ScaledRows, filters: Filters) -> Thresholds:
        return find_thresholds(_checked(logits), rows, filters)

    def draw(
        self, logits: Tensor, rows: ScaledRows, thresholds: Thresholds | None, keys: Keys
    ) -> Tensor:
        if not rows.row.numel():
            return torch.empty_like(rows.row)
        size, block = _checked(logits).shape[1], min(_DRAW_BLOCK, _block(logits))
        num_blocks, grid = spread(rows.row.numel(), triton.cdiv(size, 4), block)
        best = torch.empty(grid, dtype=torch.int64, device=logits.device)
        draw_kernel[grid](
            logits, rows.row, rows.max_logit, rows.scale, *_threshold_tensors(thresholds, rows),
            keys.seed,
            keys.position, best, size, num_blocks, STREAM=TOKEN_STREAM,
            IS_FILTERED=thresholds is not None, BLOCK=block, **_options(),
        )  # fmt: skip
        # the last is for rows without a number
        return best.amin(dim=1).bitwise_and_(ID_BITS.value).clamp_max_(size - 1)

    def score(
        self,
        logits: Tensor,
        rows: ScaledRows,
        thresholds: Thresholds | None,
        token_ids: Tensor,
        *,
        num_top: int = 0,
    ) -> Scores:
        totals, ranks = torch.zeros_like(rows.row), torch.ones_like(rows.row)
        if rows.row.numel():
            num_blocks, grid = spread(rows.row.numel(), _checked(logits).shape[1], _block(logits))
            score_kernel[grid](
                logits, rows.row, rows.max_logit, rows.scale, *_threshold_tensors(thresholds,
                rows), token_ids, totals, ranks,
                logits.shape[1], num_blocks, IS_FILTERED=thresholds is not None,
                BLOCK=_block(logits), **_options(),
            )  # fmt: skip
        return Scores(totals, ranks, best_ids(logits, rows, num_top))


def best_ids(logits: Tensor, rows: ScaledRows, count: int) -> Tensor:
    """int64 [n, count], best first; zeros where a row that holds NaN has too few."""
    num_rows, size = rows.row.numel(), logits.shape[1]
    if count > _MAX_TOP:
        values = logits[rows.row] + 0.0  # one zero
        return (
            torch.sort(values, dim=1, descending=True, stable=True).indices[:, :count].contiguous()
        )
    found = torch.zeros((num_rows, count), dtype=torch.int64, device=logits.device)
    if not found.numel():
        return found
    best = find_thresholds(
        _checked(logits),
        ScaledRows(rows.row, rows.max_logit, torch.ones_like(rows.max_logit)),
        _only_top_k(rows, count),
    )
    counters, places, block = torch.zeros_like(rows.row), torch.empty_like(found), _block(logits)
    collect_kernel[(num_rows, triton.cdiv(size, block))](
        logits,
        rows.row,
        best.value,
        best.token_id,
        counters,
        places,
        size,
        count,
        BLOCK=block,
        **_options(),
    )
    width = max(_LEAST_WIDTH, triton.next_power_of_2(count))
    order_kernel[(num_rows,)](
        logits,
        rows.row,
        counters,
        places,
        found,
        size,
        count,
        WIDTH=width,
        BLOCK=block,
        **_options(),
    )
    return found


def _only_top_k(rows: ScaledRows, count: int) -> Filters:
    keeps_all = torch.ones(rows.row.numel(), dtype=torch.float64, device=rows.row.device)
    return Filters(
        torch.full_like(rows.row, count), keeps_all, torch.full_like(rows.max_logit, -math.inf)
    )


def _threshold_tensors(thresholds: Thresholds | None, rows: ScaledRows) -> tuple[Tensor, Tensor]:
    """Always tensors; a kernel without thresholds does not read them."""
    return (
        (rows.max_logit, rows.row)
        if thresholds is None
        else (thresholds.value, thresholds.token_id)
    )


def _checked(logits: Tensor) -> Tensor:
    if (
        logits.dtype is not torch.float32
        or logits.dim() != 2
        or logits.shape[1] == 0
        or not logits.is_contiguous()
    ):
        raise TypeError(
            f"logits are {logits.dtype} {list(logits.shape)}; expected contiguous float32 "
            "[R, V], V above 0"
        )
    return logits


def _block(logits: Tensor) -> int:
    return min(_BLOCK, triton.next_power_of_2(logits.shape[1]))


def _options() -> dict[str, object]:
    return launch_options(_NUM_WARPS)
