"""Triton kernels of projections of floating-point weights, and their epilogues. They have
not run on a GPU yet.

Split-K: the K dimension is divided into NUM_SPLITS chunks of SPLIT_LEN inputs, which depend on the
weight's shape alone. A chunk is summed by matrix instructions over ascending inputs, BLOCK_K at a
time, in float32; chunks are added in ascending order. One program may do all of them (many rows),
or one each, stored and added by `finish_kernel`, or by the kernel that consumes the result (few
rows, which would leave most of the device idle): the additions are the same, and so are the bits.
Tiles have the same size for any number of rows, so that the same instructions compute a row in any
batch.

A *pair* is outputs j and N / 2 + j: gate and up. A tile of pairs has the two side by side, so that
one product of the same width gives both, and each thread finds the two halves of its pairs in its
own registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.activation import gated_product


@triton.jit
def tile_of(num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which tile a program computes: eight tiles of rows beside each other share a weight's
    tile while it is in the L2."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    program = tl.program_id(0)
    band = program // (8 * column_tiles)
    first = band * 8
    height = tl.minimum(row_tiles - first, 8)
    within = program % (8 * column_tiles)
    return first + within % height, within // height


@triton.jit
def columns_of(tile, num_outputs, BLOCK_N: tl.constexpr, IS_PAIR: tl.constexpr):
    """The outputs of a tile, int64 [BLOCK_N], and which of them there are.
    Those of a pair are neighbours: 0, N / 2, 1, ..."""
    lanes = tl.arange(0, BLOCK_N)
    if IS_PAIR:
        num_pairs = (num_outputs + 1) // 2
        pairs = tile * (BLOCK_N // 2) + lanes // 2
        columns = pairs + (lanes % 2) * num_pairs
        is_column = (pairs < num_pairs) & (columns < num_outputs)
    else:
        columns = tile * BLOCK_N + lanes
        is_column = columns < num_outputs
    return columns.to(tl.int64), is_column


@triton.jit
def halves_of(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of pairs [M, N] as two tiles [M, N / 2]."""
    return tl.split(tl.reshape(tile, [BLOCK_M, BLOCK_N // 2, 2]))


@triton.jit
def sum_chunk(
    x, weight, rows, is_row, columns, is_column, begin, end, num_inputs, sums, BLOCK_K: tl.constexpr
):
    """sums [M, N] plus x[rows] @ weight[columns].T over inputs [begin, end); x [T,
    K] and weight [N, K] row by row."""
    for first in range(begin, end, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        is_input = inputs < end
        a = tl.load(
            x + rows[:, None] * num_inputs + inputs[None, :],
            mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + columns[None, :] * num_inputs + inputs[:, None],
            mask=is_column[None, :] & is_input[:, None],
            other=0.0,
        )
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def sum_all(
    x, weight, rows, is_row, columns, is_column, num_inputs,
    SPLIT_LEN: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add all chunks in ascending order: float32 [M, N]."""
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    end = tl.minimum(SPLIT_LEN, num_inputs)
    total = sum_chunk(
        x, weight, rows, is_row, columns, is_column, 0, end, num_inputs, zeros, BLOCK_K
    )
    for split in range(1, NUM_SPLITS):
        begin = split * SPLIT_LEN
        end = tl.minimum(begin + SPLIT_LEN, num_inputs)
        total += sum_chunk(
            x, weight, rows, is_row, columns, is_column, begin, end, num_inputs, zeros, BLOCK_K
        )
    return total


@triton.jit
def with_bias(sums, bias, columns, is_column, HAS_BIAS: tl.constexpr):
    """sums [M, N] plus bias[columns] where there is one."""
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x, weight, bias, out, num_rows, num_outputs, num_inputs,
    SPLIT_LEN: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr, IS_PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, splits (one unless IS_PARTIAL). With an ACTIVATION of 0 or more, pairs: out is
    [T, N / 2].

    IS_PARTIAL stores a chunk alone to out [splits, T, N] in float32, without bias.
    """
    IS_PAIR: tl.constexpr = ACTIVATION >= 0
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_PAIR else BLOCK_N
    num_columns = num_outputs // 2 if IS_PAIR else num_outputs
    row_tile, column_tile = tile_of(num_rows, num_columns, BLOCK_M, WIDTH)
    rows = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns, is_column = columns_of(column_tile, num_outputs, BLOCK_N, IS_PAIR)
    is_row = rows < num_rows
    if IS_PARTIAL:
        begin = tl.program_id(1) * SPLIT_LEN
        end = tl.minimum(begin + SPLIT_LEN, num_inputs)
        zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        sums = sum_chunk(
            x, weight, rows, is_row, columns, is_column, begin, end, num_inputs, zeros, BLOCK_K
        )
        base = out + tl.program_id(1).to(tl.int64) * num_rows * num_outputs
        tl.store(
            base + rows[:, None] * num_outputs + columns[None, :],
            sums,
            mask=is_row[:, None] & is_column[None, :],
        )
    else:
        sums = sum_all(
            x,
            weight,
            rows,
            is_row,
            columns,
            is_column,
            num_inputs,
            SPLIT_LEN,
            NUM_SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        sums = with_bias(sums, bias, columns, is_column, HAS_BIAS)
        if IS_PAIR:
            gate, up = halves_of(sums, BLOCK_M, BLOCK_N)
            sums = gated_product(gate, up, ACTIVATION)
        places, is_place = columns_of(column_tile, num_columns, WIDTH, False)
        is_element = is_row[:, None] & is_place[None, :]
        tl.store(
            out + rows[:, None] * num_columns + places[None, :],
            sums.to(out.dtype.element_ty),
            mask=is_element,
        )


@triton.jit(do_not_specialize=["num_rows"])
def finish_kernel(
    partial, bias, out, num_rows, num_outputs, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Adds partial [splits, T, N] in ascending order, then bias,
    then activation and product of a pair."""
    IS_PAIR: tl.constexpr = ACTIVATION >= 0
    num_columns = num_outputs // 2 if IS_PAIR else num_outputs
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    first, stride = row * num_outputs, num_rows * num_outputs
    sums = finished(
        partial, bias, first + columns, columns, is_column, stride, tl.float32, NUM_SPLITS, HAS_BIAS
    )
    if IS_PAIR:
        others = columns + num_columns
        up = finished(
            partial,
            bias,
            first + others,
            others,
            is_column,
            stride,
            tl.float32,
            NUM_SPLITS,
            HAS_BIAS,
        )
        sums = gated_product(sums, up, ACTIVATION)
    tl.store(out + row * num_columns + columns, sums.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def add_partials(pointers, mask, stride, NUM_SPLITS: tl.constexpr):
    """The values at `pointers`, `pointers + stride`, ... added in ascending order."""
    wide_stride = tl.zeros([], tl.int64) + stride
    total = tl.load(pointers, mask=mask, other=0.0)
    for split in range(1, NUM_SPLITS):
        total += tl.load(pointers + split * wide_stride, mask=mask, other=0.0)
    return total


@triton.jit
def finished(
    source,
    bias,
    there,
    columns,
    mask,
    stride,
    dtype: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Load elements of a GEMM's result as float32: those at `source + there`; or, where the split-K
    reduction is deferred (NUM_SPLITS above 0), the sum of its chunks, a `stride` apart, plus bias,
    rounded to `dtype`.
    """
    if NUM_SPLITS == 0:
        value = tl.load(source + there, mask=mask, other=0.0).to(tl.float32)
    else:
        value = add_partials(source + there, mask, stride, NUM_SPLITS)
        if HAS_BIAS:
            value += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["num_rows"])
def tile_argmax_kernel(
    x, weight, bias, values, ids, num_rows, num_outputs, num_inputs, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Each tile's largest output and its id, the lowest of equals, to values and ids [T,
    num_tiles]; NaN if there is one."""
    row_tile, column_tile = tile_of(num_rows, num_outputs, BLOCK_M, BLOCK_N)
    rows = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns, is_column = columns_of(column_tile, num_outputs, BLOCK_N, False)
    is_row = rows < num_rows
    sums = sum_all(
        x,
        weight,
        rows,
        is_row,
        columns,
        is_column,
        num_inputs,
        1 << 30,
        1,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    sums = with_bias(sums, bias, columns, is_column, HAS_BIAS)
    sums = tl.where(is_column[None, :], sums, float("-inf"))
    row_max, place = tl.max(sums, axis=1, return_indices=True, return_indices_tie_break_left=True)
    has_nan = tl.max((sums != sums).to(tl.int32), axis=1) > 0
    where = rows * num_tiles + column_tile
    tl.store(values + where, tl.where(has_nan, float("nan"), row_max), mask=is_row)
    tl.store(ids + where, column_tile * BLOCK_N + place, mask=is_row)
