"""Sampling in Triton, to the reference's bits: `SamplingKernels` for logits on a GPU. It has not
run on a GPU yet.

Owns draws, scores, penalties and the best alternatives. Where filters cut a row off is found by
`cut_search`, and so are the alternatives, which are what a top-k would keep; only they are sorted.
To draw and to score, several programs share a row. What they bring together are integers (weights,
and tokens in the order of their scores), so nothing depends on how a row is cut into stretches. It
never judges logits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling import TOKEN_STREAM, Cuts, Filters, Keys, Penalties, ScaledRows, Scores
from quire.kernels.triton.checks import launch_options
from quire.kernels.triton.cut_search import (
    ID_BITS,
    NO_PLACE,
    append,
    find_cuts,
    id_at,
    key_of,
    place_of,
    spread,
)
from quire.kernels.triton.noise import gumbel, philox, weigh
from quire.kernels.triton.row_peaks import tile_peaks

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
    """Whether a cut keeps the tokens."""
    return ((x > value) | ((x == value) & (ids <= last_id))) & (x > float("-inf"))


@triton.jit(do_not_specialize=["count"])
def collect_kernel(
    logits, row, cut_value, cut_id, counters, places, size, count, BLOCK: tl.constexpr
):
    """Appends the places of a stretch's tokens that a cut keeps, of asked row program_id(0)."""
    asked = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(row + asked) * size + ids, mask=ids < size, other=float("-inf"))
    is_best = is_kept(x, ids, tl.load(cut_value + asked), tl.load(cut_id + asked))
    append(place_of(key_of(x), ids), is_best, places + asked * count, counters + asked, count)


@triton.jit(do_not_specialize=["count"])
def order_kernel(
    logits, row, counters, places, found, size, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The ids of the places of asked row program_id(0), best first; where they are too few,
    the first of -inf follow."""
    asked = tl.program_id(0)
    line = logits + tl.load(row + asked) * size
    # more only in rows that are not finite
    num_found = tl.minimum(tl.load(counters + asked), count).to(tl.int32)
    number = tl.arange(0, WIDTH)
    own = tl.load(places + asked * count + number, mask=number < num_found, other=0)
    num_better = tl.zeros([WIDTH], tl.int32)
    for i in range(0, num_found):
        num_better += (tl.load(places + asked * count + i) < own).to(tl.int32)
    tl.store(found + asked * count + num_better, id_at(own), mask=number < num_found)
    first = 0
    while (num_found < count) & (first < size):
        ids = first + tl.arange(0, BLOCK)
        is_empty = tl.load(line + ids, mask=ids < size, other=0.0) == float("-inf")
        slots = num_found + tl.cumsum(is_empty.to(tl.int32), axis=0) - 1
        tl.store(found + asked * count + slots, ids.to(tl.int64), mask=is_empty & (slots < count))
        num_found += tl.sum(is_empty.to(tl.int32), axis=0)
        first += BLOCK


@triton.jit(do_not_specialize=["num_blocks"])
def draw_kernel(
    logits, row, peaks, scales, cut_value, cut_id, seeds, positions, best_places, size, num_blocks,
    STREAM: tl.constexpr, HAS_CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The place of the best token of stretch program_id(1), with its noise,
    of asked row program_id(0)."""
    asked, begin = tl.program_id(0), tl.program_id(1) * num_blocks * BLOCK
    line = logits + tl.load(row + asked) * size
    peak, scale = tl.load(peaks + asked), tl.load(scales + asked)
    seed, position = tl.load(seeds + asked), tl.load(positions + asked)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    value, last_id = 0.0, tl.zeros([], tl.int64)
    if HAS_CUTS:
        value, last_id = tl.load(cut_value + asked), tl.load(cut_id + asked)
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
            score = (x - peak) * scale + gumbel(words[j])
            if HAS_CUTS:
                score = tl.where(is_kept(x, ids, value, last_id), score, float("-inf"))
            is_number = (ids < size) & (score == score)
            best = tl.minimum(best, tl.where(is_number, place_of(key_of(score), ids), NO_PLACE))
    tl.store(best_places + asked * tl.num_programs(1) + tl.program_id(1), tl.min(best, axis=0))


@triton.jit(do_not_specialize=["num_blocks"])
def score_kernel(
    logits, row, peaks, scales, cut_value, cut_id, token_ids, totals, ranks, size, num_blocks,
    HAS_CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds stretch program_id(1) of asked row program_id(0): to its total weight,
    and to the rank of one of its tokens."""
    asked, begin = tl.program_id(0), tl.program_id(1) * num_blocks * BLOCK
    line = logits + tl.load(row + asked) * size
    peak, scale = tl.load(peaks + asked), tl.load(scales + asked)
    own = tl.load(line + tl.load(token_ids + asked))
    value, last_id = 0.0, tl.zeros([], tl.int64)
    if HAS_CUTS:
        value, last_id = tl.load(cut_value + asked), tl.load(cut_id + asked)
    total = tl.zeros([BLOCK], tl.int64)
    num_better = tl.zeros([BLOCK], tl.int64)
    for first in range(begin, tl.minimum(begin + num_blocks * BLOCK, size), BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < size, other=float("-inf"))
        is_in = x > float("-inf")
        if HAS_CUTS:
            is_in = is_kept(x, ids, value, last_id)
        total += tl.where(is_in, weigh((x - peak) * scale), 0)
        num_better += (x > own).to(tl.int64)
    tl.atomic_add(totals + asked, tl.sum(total, axis=0), sem="relaxed")
    tl.atomic_add(ranks + asked, tl.sum(num_better, axis=0), sem="relaxed")


@triton.jit
def count_kernel(token_ids, starts, output_starts, counts, size, BLOCK: tl.constexpr):
    """Counts the output's tokens of asked row program_id(0) into counts [n, V],
    and marks all its tokens with _SEEN."""
    asked = tl.program_id(0)
    begin, end, output = (
        tl.load(starts + asked),
        tl.load(starts + asked + 1),
        tl.load(output_starts + asked),
    )
    line = counts + asked.to(tl.int64) * size
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
    """Penalises a stretch of asked row program_id(0) by its counts."""
    asked = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = logits + tl.load(row + asked) * size + ids
    held = tl.load(counts + asked.to(tl.int64) * size + ids, mask=ids < size, other=0)
    x = tl.load(there, mask=ids < size, other=0.0)
    repetition = tl.zeros([BLOCK], tl.float32) + tl.load(repetitions + asked)
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    count = (held & (_SEEN - 1)).to(tl.float32)
    less = (y - tl.load(frequencies + asked) * count) - tl.load(presences + asked)
    tl.store(there, tl.where(count > 0, less, y), mask=(ids < size) & (held != 0))


class TritonSampling:
    """`SamplingKernels` for float32 logits on a GPU. Holds no state."""

    name = "triton"

    def peaks(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return tile_peaks(_checked(logits), None)

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

    def cuts(self, logits: Tensor, rows: ScaledRows, filters: Filters) -> Cuts:
        return find_cuts(_checked(logits), rows, filters)

    def draw(self, logits: Tensor, rows: ScaledRows, cuts: Cuts | None, keys: Keys) -> Tensor:
        if not rows.row.numel():
            return torch.empty_like(rows.row)
        size, block = _checked(logits).shape[1], min(_DRAW_BLOCK, _block(logits))
        num_blocks, grid = spread(rows.row.numel(), triton.cdiv(size, 4), block)
        best = torch.empty(grid, dtype=torch.int64, device=logits.device)
        draw_kernel[grid](
            logits, rows.row, rows.peak, rows.scale, *_cut_tensors(cuts, rows), keys.seed,
            keys.position, best, size, num_blocks, STREAM=TOKEN_STREAM, HAS_CUTS=cuts is not None,
            BLOCK=block, **_options(),
        )  # fmt: skip
        # the last is for rows without a number
        return best.amin(dim=1).bitwise_and_(ID_BITS.value).clamp_max_(size - 1)

    def score(
        self,
        logits: Tensor,
        rows: ScaledRows,
        cuts: Cuts | None,
        token_ids: Tensor,
        *,
        num_top: int = 0,
    ) -> Scores:
        totals, ranks = torch.zeros_like(rows.row), torch.ones_like(rows.row)
        if rows.row.numel():
            num_blocks, grid = spread(rows.row.numel(), _checked(logits).shape[1], _block(logits))
            score_kernel[grid](
                logits, rows.row, rows.peak, rows.scale, *_cut_tensors(cuts, rows), token_ids,
                totals, ranks,
                logits.shape[1], num_blocks, HAS_CUTS=cuts is not None, BLOCK=_block(logits),
                **_options(),
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
    best = find_cuts(
        _checked(logits),
        ScaledRows(rows.row, rows.peak, torch.ones_like(rows.peak)),
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
        torch.full_like(rows.row, count), keeps_all, torch.full_like(rows.peak, -math.inf)
    )


def _cut_tensors(cuts: Cuts | None, rows: ScaledRows) -> tuple[Tensor, Tensor]:
    """Tensors in any case: a kernel without cuts does not look at them."""
    return (rows.peak, rows.row) if cuts is None else (cuts.value, cuts.token_id)


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
