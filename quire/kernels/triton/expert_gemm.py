"""Triton kernels of mixtures of experts: choosing, sorting, the grouped products, and their sum.
Not run on a GPU yet.

A *pair* of token and choice is numbered token * k + choice. Pairs are put in the order of their
experts, those of one expert in the order of their numbers; then an expert's pairs are rows of
ordinary products, in tiles of one size (see `gemm`), so that the bits of a pair do not depend on
the others, nor on its place among them. The grid follows from the number of pairs
alone: nothing is read back from the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.activation import gated_product
from quire.kernels.triton.attention import find_sequence
from quire.kernels.triton.gemm import columns_of, halves_of, sum_chunk, with_bias
from quire.kernels.triton.integer_gemm import FLOAT_INPUTS, chunk_sums, store_outputs


@triton.jit
def _first_of(values, best, lanes, BLOCK: tl.constexpr):
    """The lowest lane that holds `best`."""
    return tl.min(tl.where(values == best, lanes, BLOCK), axis=0)


@triton.jit
def _in_best_groups(
    values, lanes, group_size, GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, SUMS_BEST_TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values [BLOCK], those of groups that are not among the best as minus infinity."""
    groups = tl.arange(0, GROUPS_PADDED)
    totals = tl.full([GROUPS_PADDED], float("-inf"), tl.float32)
    for group in range(0, GROUPS):
        own = tl.where(lanes // group_size == group, values, float("-inf"))
        total = tl.max(own, axis=0)
        if SUMS_BEST_TWO:
            place = _first_of(own, total, lanes, BLOCK)
            total += tl.max(tl.where(lanes == place, float("-inf"), own), axis=0)
        totals = tl.where(groups == group, total, totals)
    kept = tl.full([BLOCK], float("-inf"), tl.float32)
    for _ in range(0, GROUPS_CHOSEN):
        group = _first_of(totals, tl.max(totals, axis=0), groups, GROUPS_PADDED)
        kept = tl.where(lanes // group_size == group, values, kept)
        totals = tl.where(groups == group, float("-inf"), totals)
    return kept


@triton.jit
def choose_kernel(
    logits, bias, ids, weights, num_experts, factor, COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr, BLOCK: tl.constexpr, IS_NORMALISED: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr, GROUPS_PADDED: tl.constexpr, SUMS_BEST_TWO: tl.constexpr,
):  # fmt: skip
    """The COUNT best of row program_id(0) of logits [T, E], and what they weigh."""
    token = tl.program_id(0).to(tl.int64)
    lanes, places = tl.arange(0, BLOCK), tl.arange(0, COUNT_PADDED)
    row = tl.load(
        logits + token * num_experts + lanes, mask=lanes < num_experts, other=float("-inf")
    )
    is_broken = (
        tl.max(((lanes < num_experts) & ((tl.abs(row) < float("inf")) == 0)).to(tl.int32), axis=0)
        > 0
    )
    row = tl.where(is_broken & (lanes < num_experts), 0.0, row)
    if IS_SIGMOID:
        ones = tl.full([BLOCK], 1.0, tl.float32)
        shares = tl.div_rn(ones, ones + tl.exp(-row))
        row = tl.where(lanes < num_experts, shares, float("-inf"))
        if HAS_BIAS:
            row += tl.load(bias + lanes, mask=lanes < num_experts, other=0.0)
    else:
        shares = tl.exp(row - tl.max(row, axis=0))
    if GROUPS > 1:
        row = _in_best_groups(
            row, lanes, num_experts // GROUPS, GROUPS, GROUPS_CHOSEN, GROUPS_PADDED, SUMS_BEST_TWO,
            BLOCK,
        )  # fmt: skip
    chosen_ids = tl.zeros([COUNT_PADDED], tl.int32)
    chosen = tl.zeros([COUNT_PADDED], tl.float32)
    for j in range(0, COUNT):
        best = tl.max(row, axis=0)
        place = _first_of(row, best, lanes, BLOCK)
        share = tl.sum(tl.where(lanes == place, shares, 0.0), axis=0)
        chosen_ids = tl.where(places == j, place, chosen_ids)
        chosen = tl.where(places == j, share, chosen)
        row = tl.where(lanes == place, float("-inf"), row)
    result = chosen
    if IS_NORMALISED or not IS_SIGMOID:
        total = tl.sum(chosen, axis=0) if IS_NORMALISED else tl.sum(shares, axis=0)
        if IS_SIGMOID:
            total += 1e-20
        result = tl.div_rn(chosen, tl.zeros([COUNT_PADDED], tl.float32) + total)
    result *= factor
    there = token * COUNT + places
    tl.store(ids + there, tl.where(is_broken, 0, chosen_ids).to(tl.int64), mask=places < COUNT)
    tl.store(weights + there, tl.where(is_broken, float("nan"), result), mask=places < COUNT)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(ids, counts, num_pairs, BLOCK: tl.constexpr):
    """How many of ids [P] are expert program_id(0)."""
    expert = tl.program_id(0)
    held = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        held += (tl.load(ids + pairs, mask=pairs < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(held, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    ids, counts, starts, order, num_pairs, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the pairs of expert program_id(0) to `order`, ascending, behind those of lower
    experts; `starts` [E + 1] says where each expert's begin.
    """
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERTS)
    held = tl.load(counts + others, mask=others < num_experts, other=0)
    start = tl.sum(tl.where(others < expert, held, 0), axis=0)
    tl.store(starts + expert, start)
    if expert == num_experts - 1:
        tl.store(starts + num_experts, tl.sum(held, axis=0))
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        is_own = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1) == expert
        own = is_own.to(tl.int32)
        tl.store(order + start + tl.cumsum(own, axis=0) - 1, pairs, mask=is_own)
        start += tl.sum(own, axis=0)


@triton.jit
def expert_tile(order, starts, num_experts, tile, BLOCK_M: tl.constexpr):
    """Return a tile's expert; the places of its pairs in the order of experts, which of them are
    there, and the pairs; and whether any is: the grid has some tiles too many."""
    expert = find_sequence(starts, num_experts, tile, BLOCK_M)
    start, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    first = start + (tile - (start // BLOCK_M + expert)) * BLOCK_M
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < end
    pairs = tl.load(order + places, mask=is_row, other=0).to(tl.int64)
    return expert, places.to(tl.int64), is_row, pairs, first < end


@triton.jit
def expert_kernel(
    x, weight, bias, out, order, starts, num_experts, num_columns, num_inputs,
    NUM_CHOICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of pairs (`find_sequence`), tiles of columns. With an ACTIVATION of 0 or more: x
    [T, K], weight [E, 2 N, K], and out [P, N] is a gated product in the order of experts. Else x
    [P, K] is in that order, weight [E, N, K], and out [P, N], float32, in the order of pairs.
    A bias has the outputs of the weight.
    """
    expert, places, is_row, pairs, has_rows = expert_tile(
        order, starts, num_experts, tl.program_id(0), BLOCK_M
    )
    if not has_rows:
        return
    IS_PAIR: tl.constexpr = ACTIVATION >= 0
    num_outputs = 2 * num_columns if IS_PAIR else num_columns
    columns, is_column = columns_of(tl.program_id(1), num_outputs, BLOCK_N, IS_PAIR)
    base = weight + expert.to(tl.int64) * num_outputs * num_inputs
    rows, targets = places, pairs
    if IS_PAIR:
        rows, targets = pairs // NUM_CHOICES, places
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sums = sum_chunk(
        x, base, rows, is_row, columns, is_column, 0, num_inputs, num_inputs, zeros, BLOCK_K
    )
    sums = with_bias(sums, bias + expert * num_outputs, columns, is_column, HAS_BIAS)
    if IS_PAIR:
        gate, up = halves_of(sums, BLOCK_M, BLOCK_N)
        sums = gated_product(gate, up, ACTIVATION)
    there, is_there = columns_of(
        tl.program_id(1), num_columns, BLOCK_N // 2 if IS_PAIR else BLOCK_N, False
    )
    is_element = is_row[:, None] & is_there[None, :]
    tl.store(
        out + targets[:, None] * num_columns + there[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_element,
    )


@triton.jit
def integer_expert_kernel(
    x, x_scales, weight, scales, offsets, bias, out, order, starts, num_experts, num_columns,
    num_inputs, NUM_CHOICES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr,
    INPUTS: tl.constexpr, IS_FP8: tl.constexpr, HAS_FP8: tl.constexpr, IS_MXFP4: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_RAW: tl.constexpr,
):  # fmt: skip
    """As `expert_kernel`, of a weight as `integer_gemm` has it, arranged by experts; scales and
    offsets are [K / GROUP, E N]. A row's sums are those of `integer_kernel`, chunk after chunk
    without a cut.
    """
    expert, places, is_row, known, has_rows = expert_tile(
        order, starts, num_experts, tl.program_id(0), BLOCK_M
    )
    if not has_rows:
        return
    IS_GATED: tl.constexpr = ACTIVATION >= 0
    IS_PAIR: tl.constexpr = IS_GATED or (BITS == 4)
    num_outputs = 2 * num_columns if IS_GATED else num_columns
    num_pairs = (num_outputs + 1) // 2
    columns, is_column = columns_of(tl.program_id(1), num_outputs, BLOCK_N, IS_PAIR)
    pairs, is_pair = columns_of(tl.program_id(1), num_pairs, BLOCK_N // 2, False)
    rows, targets = places, known
    if IS_GATED:
        rows, targets = known // NUM_CHOICES, places
    begin = expert.to(tl.int64) * num_outputs
    weight_rows = expert.to(tl.int64) * (num_pairs if BITS == 4 else num_outputs)
    total = chunk_sums(
        x, weight + weight_rows * num_inputs, scales + begin, offsets + begin, rows, is_row,
        columns, is_column, pairs, is_pair, 0, num_inputs, num_experts * num_outputs, num_inputs,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_K, BITS, INPUTS, IS_FP8, HAS_FP8, IS_MXFP4, HAS_OFFSETS,
        IS_RAW,
    )  # fmt: skip
    if IS_RAW:
        scale = tl.load(scales + begin + columns, mask=is_column, other=0.0)
        total = scale[None, :] * total.to(tl.float32) + 0.0  # no -0
    if INPUTS != FLOAT_INPUTS:
        total = total * tl.load(x_scales + rows, mask=is_row, other=0.0)[:, None]
    total = with_bias(total, bias + begin, columns, is_column, HAS_BIAS)
    store_outputs(
        out,
        targets,
        is_row,
        tl.program_id(1),
        total,
        num_columns,
        BLOCK_M,
        BLOCK_N,
        BITS,
        ACTIVATION,
    )


@triton.jit
def combine_kernel(
    partial, ids, weights, out, num_experts, width, NUM_CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """Token program_id(0): its partial results [P, width], weighed,
    added in ascending order of choices."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(0, NUM_CHOICES):
        pair = token * NUM_CHOICES + j
        expert = tl.load(ids + pair)
        is_here = (expert >= 0) & (expert < num_experts)
        part = tl.load(
            partial + pair * width + columns, mask=is_here & (columns < width), other=0.0
        )
        total += part * tl.where(is_here, tl.load(weights + pair), 0.0)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=columns < width)
