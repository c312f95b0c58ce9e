"""Sampling in Triton, to the reference's bits: `SamplingKernels` for logits on a GPU. It has not run on a GPU yet.

A program takes one asked row and walks along its vocabulary. Filters need no sort: the logit of the last token kept is found
by bisection (as an integer of the same order), with a pass over the row at each of some 25 steps, which finds the row in the
L2; its id then takes one pass more. The best alternatives are found in the same way, and only they are sorted. Counts and
weights are integers, so nothing depends on how a pass is cut into pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling import TOKEN_STREAM, Cuts, Filters, Keys, Penalties, ScaledRows, Scores
from quire.kernels.triton.checks import launch_options
from quire.kernels.triton.noise import gumbel, philox, weigh
from quire.kernels.triton.row_peaks import tile_peaks

_BLOCK = 2048
_DRAW_BLOCK = 512
"""Counters, each of which makes the noise of four tokens."""
_NUM_WARPS = 8
_MAX_TOP = 1024
"""More alternatives than this (the whole vocabulary, say) are sorted with all others."""
_SEEN = tl.constexpr(1 << 30)
_LEAST_KEY = tl.constexpr(-2147483648)
_MAX_ID = tl.constexpr(9223372036854775807)
_COUNT_ELEMENTS = 1 << 25
"""Counts of penalised tokens held at once: 128 MiB."""


@triton.jit
def key_of(x):
    """int32 that are ordered as float32 x are; both zeros are the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """What `key_of` was made of."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def reaches(logits, size, peak, scale, floor, limit_key, limit_id, key, last_id, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Number, or weight, of tokens at `floor` or above, within the limit, and best first no later than (key, last_id)."""
    sums = tl.zeros([BLOCK], tl.int64)
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        distance = (x - peak) * scale
        keys = key_of(x)
        is_in = (x > float("-inf")) & (distance >= floor)
        is_in = is_in & ((keys > limit_key) | ((keys == limit_key) & (ids <= limit_id)))
        is_in = is_in & ((keys > key) | ((keys == key) & (ids <= last_id)))
        if HAS_WEIGHT:
            sums += tl.where(is_in, weigh(distance), 0)
        else:
            sums += is_in.to(tl.int64)
    return tl.sum(sums, axis=0)


@triton.jit
def nth_equal(logits, size, peak, scale, floor, limit_key, limit_id, key, count, BLOCK: tl.constexpr):
    """The id of the `count`-th token of those whose key is `key`, within the limit, in the order of their ids."""
    seen = tl.zeros([], tl.int64)
    found = tl.zeros([], tl.int32)
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        is_equal = (x > float("-inf")) & ((x - peak) * scale >= floor) & (key_of(x) == key)
        is_equal = is_equal & ((key > limit_key) | (ids <= limit_id))
        places = seen + tl.cumsum(is_equal.to(tl.int32), axis=0)
        found += tl.sum(tl.where(is_equal & (places == count), ids, 0), axis=0)
        seen += tl.sum(is_equal.to(tl.int64), axis=0)
    return found


@triton.jit
def shortest(
    logits, size, peak, scale, floor, limit_key, limit_id, least_key, target, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """(key, id) of the last token of the shortest best-first prefix that reaches `target`; none has a key below least_key."""
    low = least_key.to(tl.int64)
    high = key_of(peak).to(tl.int64)
    while low < high:
        key = ((low + high + 1) >> 1).to(tl.int32)
        held = reaches(logits, size, peak, scale, floor, limit_key, limit_id, key, size, BLOCK, HAS_WEIGHT)
        is_enough = held >= target
        low = tl.where(is_enough, key.to(tl.int64), low)
        high = tl.where(is_enough, high, key.to(tl.int64) - 1)
    key = low.to(tl.int32)
    before = reaches(logits, size, peak, scale, floor, limit_key, limit_id, key, -1, BLOCK, HAS_WEIGHT)
    missing = target - before
    if HAS_WEIGHT:  # equals weigh the same, and something, or their key would not have reached the target
        each = weigh((value_of(key) - peak) * scale)
        missing = (missing + each - 1) // each
    return key, nth_equal(logits, size, peak, scale, floor, limit_key, limit_id, key, missing, BLOCK)


@triton.jit
def cuts_kernel(
    logits, row, peaks, scales, top_k, top_p, floors, cut_value, cut_id, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """`SamplingKernels.cuts` of asked row program_id(0)."""
    asked = tl.program_id(0)
    line = logits + tl.load(row + asked) * size
    peak, scale, floor = tl.load(peaks + asked), tl.load(scales + asked), tl.load(floors + asked)
    least_key = tl.full([BLOCK], 2147483647, tl.int32)
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < size, other=float("-inf"))
        is_in = (x > float("-inf")) & ((x - peak) * scale >= floor)
        least_key = tl.minimum(least_key, tl.where(is_in, key_of(x), 2147483647))
    limit_key = tl.zeros([], tl.int32) + _LEAST_KEY
    limit_id = tl.zeros([], tl.int32) + size
    num_kept = reaches(line, size, peak, scale, floor, limit_key, limit_id, limit_key, limit_id, BLOCK, False)
    least = tl.min(least_key, axis=0)
    last_key, last_id = least, limit_id - 1
    wanted = tl.load(top_k + asked)
    if wanted < num_kept:
        limit_key, limit_id = shortest(line, size, peak, scale, floor, limit_key, limit_id, least, wanted, BLOCK, False)
        last_key, last_id = limit_key, limit_id
    share = tl.load(top_p + asked)
    if share < 1.0:
        total = reaches(line, size, peak, scale, floor, limit_key, limit_id, limit_key, limit_id, BLOCK, True)
        target = tl.ceil(share * total.to(tl.float64)).to(tl.int64)
        if target <= total:
            key, place = shortest(line, size, peak, scale, floor, limit_key, limit_id, least, target, BLOCK, True)
            if reaches(line, size, peak, scale, floor, key, place, key, place, BLOCK, False) < num_kept:
                last_key, last_id = key, place
    tl.store(cut_value + asked, value_of(last_key))
    tl.store(cut_id + asked, last_id.to(tl.int64))


@triton.jit
def top_kernel(logits, row, peaks, found_ids, found_values, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The COUNT best tokens of asked row program_id(0), in the order of ids: numbers, then -inf where they are too few."""
    asked = tl.program_id(0)
    line = logits + tl.load(row + asked) * size
    peak = tl.load(peaks + asked)
    num_finite = tl.zeros([BLOCK], tl.int32)
    least_key = tl.full([BLOCK], 2147483647, tl.int32)
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < size, other=float("-inf"))
        num_finite += (x > float("-inf")).to(tl.int32)
        least_key = tl.minimum(least_key, tl.where(x > float("-inf"), key_of(x), 2147483647))
    wanted = tl.minimum(tl.sum(num_finite, axis=0), COUNT)
    limit_key = tl.zeros([], tl.int32) + _LEAST_KEY
    limit_id = tl.zeros([], tl.int32) + size
    floor = tl.zeros([], tl.float32) + float("-inf")
    scale = tl.zeros([], tl.float32) + 1.0
    least = tl.min(least_key, axis=0)
    key, last_id = shortest(line, size, peak, scale, floor, limit_key, limit_id, least, wanted.to(tl.int64), BLOCK, False)
    num_found = tl.zeros([], tl.int32)
    num_empty = wanted
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < size, other=float("nan"))
        keys = key_of(x)
        is_best = (x > float("-inf")) & ((keys > key) | ((keys == key) & (ids <= last_id))) & (wanted > 0)
        is_empty = x == float("-inf")
        place = tl.where(
            is_best, num_found + tl.cumsum(is_best.to(tl.int32), axis=0) - 1,
            num_empty + tl.cumsum(is_empty.to(tl.int32), axis=0) - 1,
        )  # fmt: skip
        is_stored = (is_best | is_empty) & (place < COUNT)
        tl.store(found_ids + asked * COUNT + place, ids.to(tl.int64), mask=is_stored)
        tl.store(found_values + asked * COUNT + place, x + 0.0, mask=is_stored)
        num_found += tl.sum(is_best.to(tl.int32), axis=0)
        num_empty += tl.sum(is_empty.to(tl.int32), axis=0)


@triton.jit
def is_kept(x, ids, value, last_id):
    """Whether a cut keeps the tokens."""
    return ((x > value) | ((x == value) & (ids <= last_id))) & (x > float("-inf"))


@triton.jit
def draw_kernel(
    logits, row, peaks, scales, cut_value, cut_id, seeds, positions, chosen, size, STREAM: tl.constexpr,
    HAS_CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`SamplingKernels.draw` of asked row program_id(0)."""
    asked = tl.program_id(0)
    line = logits + tl.load(row + asked) * size
    peak, scale = tl.load(peaks + asked), tl.load(scales + asked)
    seed, position = tl.load(seeds + asked), tl.load(positions + asked)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    value, last_id = 0.0, tl.zeros([], tl.int64)
    if HAS_CUTS:
        value, last_id = tl.load(cut_value + asked), tl.load(cut_id + asked)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], _MAX_ID, tl.int64)
    zeros = tl.zeros([BLOCK], tl.uint32)
    c1 = zeros + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zeros + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for first in range(0, tl.cdiv(size, 4), BLOCK):
        counter = first + tl.arange(0, BLOCK)
        words = philox(counter.to(tl.uint32), c1, c2, zeros + STREAM, k0, k1)
        for j in tl.static_range(4):
            ids = (counter * 4 + j).to(tl.int64)
            x = tl.load(line + ids, mask=ids < size, other=float("-inf"))
            score = (x - peak) * scale + gumbel(words[j])
            if HAS_CUTS:
                score = tl.where(is_kept(x, ids, value, last_id), score, float("-inf"))
            is_better = (ids < size) & ((score > best) | ((score == best) & (ids < best_id)))
            best = tl.where(is_better, score, best)
            best_id = tl.where(is_better, ids, best_id)
    top = tl.max(best, axis=0)
    tl.store(chosen + asked, tl.min(tl.where(best == top, best_id, _MAX_ID), axis=0))


@triton.jit
def score_kernel(
    logits, row, peaks, scales, cut_value, cut_id, token_ids, totals, ranks, size, HAS_CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Total weight, and the rank of one token, of asked row program_id(0)."""
    asked = tl.program_id(0)
    line = logits + tl.load(row + asked) * size
    peak, scale = tl.load(peaks + asked), tl.load(scales + asked)
    own = tl.load(line + tl.load(token_ids + asked))
    value, last_id = 0.0, tl.zeros([], tl.int64)
    if HAS_CUTS:
        value, last_id = tl.load(cut_value + asked), tl.load(cut_id + asked)
    total = tl.zeros([BLOCK], tl.int64)
    num_better = tl.zeros([BLOCK], tl.int64)
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < size, other=float("-inf"))
        is_in = x > float("-inf")
        if HAS_CUTS:
            is_in = is_kept(x, ids, value, last_id)
        total += tl.where(is_in, weigh((x - peak) * scale), 0)
        num_better += (x > own).to(tl.int64)
    tl.store(totals + asked, tl.sum(total, axis=0))
    tl.store(ranks + asked, tl.sum(num_better, axis=0) + 1)


@triton.jit
def count_kernel(token_ids, starts, output_starts, counts, size, BLOCK: tl.constexpr):
    """Counts the output's tokens of asked row program_id(0) into counts [n, V], and marks all its tokens with _SEEN."""
    asked = tl.program_id(0)
    begin, end, output = tl.load(starts + asked), tl.load(starts + asked + 1), tl.load(output_starts + asked)
    line = counts + asked.to(tl.int64) * size
    for first in range(begin, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        token = tl.load(token_ids + places, mask=places < end, other=-1)
        is_known = (token >= 0) & (token < size)
        tl.atomic_or(line + token, _SEEN, mask=is_known)
        tl.atomic_add(line + token, 1, mask=is_known & (places >= output))


@triton.jit
def penalise_kernel(logits, row, counts, repetitions, frequencies, presences, size, BLOCK: tl.constexpr):
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
                penalties.token_ids, starts, penalties.output_start[rows], counts, size, BLOCK=_BLOCK, **_options()
            )
            penalise_kernel[(count, triton.cdiv(size, _BLOCK))](
                logits, penalties.row[rows], counts, penalties.repetition[rows], penalties.frequency[rows],
                penalties.presence[rows], size, BLOCK=_BLOCK, **_options(),
            )  # fmt: skip

    def cuts(self, logits: Tensor, rows: ScaledRows, filters: Filters) -> Cuts:
        found = Cuts(torch.empty_like(rows.peak), torch.empty_like(rows.row))
        if rows.row.numel():
            cuts_kernel[(rows.row.numel(),)](
                _checked(logits), rows.row, rows.peak, rows.scale, filters.top_k, filters.top_p, filters.floor,
                found.value, found.token_id, logits.shape[1], BLOCK=_block(logits), **_options(),
            )  # fmt: skip
        return found

    def draw(self, logits: Tensor, rows: ScaledRows, cuts: Cuts | None, keys: Keys) -> Tensor:
        chosen = torch.empty_like(rows.row)
        if rows.row.numel():
            draw_kernel[(rows.row.numel(),)](
                _checked(logits), rows.row, rows.peak, rows.scale, *_cut_tensors(cuts, rows), keys.seed, keys.position, chosen,
                logits.shape[1], STREAM=TOKEN_STREAM, HAS_CUTS=cuts is not None, BLOCK=min(_DRAW_BLOCK, _block(logits)),
                **_options(),
            )  # fmt: skip
        return chosen

    def score(self, logits: Tensor, rows: ScaledRows, cuts: Cuts | None, token_ids: Tensor, *, num_top: int = 0) -> Scores:
        totals, ranks = torch.empty_like(rows.row), torch.empty_like(rows.row)
        if rows.row.numel():
            score_kernel[(rows.row.numel(),)](
                _checked(logits), rows.row, rows.peak, rows.scale, *_cut_tensors(cuts, rows), token_ids, totals, ranks,
                logits.shape[1], HAS_CUTS=cuts is not None, BLOCK=_block(logits), **_options(),
            )  # fmt: skip
        return Scores(totals, ranks, best_ids(logits, rows, num_top))


def best_ids(logits: Tensor, rows: ScaledRows, count: int) -> Tensor:
    """int64 [n, count]: best first; a stable sort, of those `count` alone, keeps equals in the order of their ids."""
    num_rows = rows.row.numel()
    if count > _MAX_TOP:
        values = logits[rows.row] + 0.0  # one zero
        return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :count].contiguous()
    ids = torch.empty((num_rows, count), dtype=torch.int64, device=logits.device)
    found = torch.empty((num_rows, count), dtype=torch.float32, device=logits.device)
    if not ids.numel():
        return ids
    top_kernel[(num_rows,)](
        _checked(logits), rows.row, rows.peak, ids, found, logits.shape[1], COUNT=count, BLOCK=_block(logits), **_options()
    )
    return ids.gather(1, torch.sort(found, dim=1, descending=True, stable=True).indices)


def _cut_tensors(cuts: Cuts | None, rows: ScaledRows) -> tuple[Tensor, Tensor]:
    """Tensors in any case: a kernel without cuts does not look at them."""
    return (rows.peak, rows.row) if cuts is None else (cuts.value, cuts.token_id)


def _checked(logits: Tensor) -> Tensor:
    if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_contiguous():
        raise TypeError(f"logits are {logits.dtype} {list(logits.shape)}; expected contiguous float32 [R, V], V above 0")
    return logits


def _block(logits: Tensor) -> int:
    return min(_BLOCK, triton.next_power_of_2(logits.shape[1]))


def _options() -> dict[str, object]:
    return launch_options(_NUM_WARPS)
