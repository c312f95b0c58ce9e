"""Triton kernels of projections of integers, of 8 or 4 bits with scales, and of e4m3 numbers
(`QuantizedWeight`). They have not run on a GPU yet.

With int8 inputs a group's sum is an exact 32-bit integer and groups are added in ascending order in
float32, a rounded multiplication and a rounded addition each: the reference's bits, whatever the
tiles. With floating-point inputs the integers are exact in the inputs' dtype, and a group's sum is
scaled as a whole, so no weight is ever rounded. e4m3 numbers are exact in bfloat16 too; with inputs
of e4m3 the matrix instructions of capability 8.9 multiply them as they are, and each BLOCK_K inputs
are added up in float32 apart, because those instructions keep few bits of a long sum.

Where that is no matter of bits (floats, or exact integers with one scale per output), K is split
into chunks as in `gemm`: of whole groups, or of a part of the only group, whose sums are then raw,
to be scaled when they are complete.

4-bit weights lie as [N / 2, K]: a byte holds output j below and output N / 2 + j above. So a tile
of bytes is a tile of *pairs* (see `gemm`), and where the outputs are gate and up, it is just what
the activation needs. A nibble stays in the upper half of a byte, or is put there, which takes a
third fewer instructions than to shift it down with its sign: it counts 16 times, and its scale,
once and for all, a 16th. Of mxfp4, whose codes are no integers, both nibbles become bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.activation import gated_product
from quire.kernels.triton.gemm import add_partials, columns_of, halves_of, tile_of, with_bias
from quire.kernels.triton.kv_rows import FP8_FORMAT, NATIVE_FP8_FORMAT, e4m3_bits, row_elements

INPUT_CODES = {"float": 0, "int8": 1, "fp8": 2}
FLOAT_INPUTS, INT8_INPUTS, FP8_INPUTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def quantize_kernel(x, values, scales, width, BLOCK: tl.constexpr, IS_FP8: tl.constexpr):
    """Row program_id(0) of x [T, K] to int8 (or e4m3) values and a float32 scale,
    as `QuantizedWeight` says."""
    base = tl.program_id(0).to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    is_odd = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        x_abs = tl.abs(
            tl.load(x + base + first + lanes, mask=first + lanes < width, other=0.0).to(tl.float32)
        )
        is_odd = is_odd | ((x_abs < float("inf")).to(tl.int32) ^ 1)
        most = tl.maximum(most, x_abs)
    is_broken = tl.max(is_odd, axis=0) > 0
    if IS_FP8:
        scale = tl.maximum(tl.div_rn(tl.max(most, axis=0), 448.0), 1.1754943508222875e-38)
        is_zero = is_broken
    else:
        scale = tl.div_rn(tl.max(most, axis=0), 127.0)
        is_zero = is_broken | (scale < 1.1754943508222875e-38)
    divisor = tl.where(is_zero, 1.0, scale)
    tl.store(
        scales + tl.program_id(0), tl.where(is_broken, float("nan"), tl.where(is_zero, 0.0, scale))
    )
    for first in range(0, width, BLOCK):
        is_there = first + lanes < width
        row = tl.load(x + base + first + lanes, mask=is_there, other=0.0).to(tl.float32)
        row = tl.where(is_zero, 0.0, row)
        quotient = tl.div_rn(row, tl.zeros([BLOCK], tl.float32) + divisor)
        if IS_FP8:
            tl.store(values + base + first + lanes, e4m3_bits(quotient).to(tl.uint8), mask=is_there)
        else:
            # 1.5 * 2**23: addition rounds to an integer, half to even
            nearest = (quotient + 12582912.0) - 12582912.0
            tl.store(values + base + first + lanes, nearest.to(tl.int8), mask=is_there)


@triton.jit
def weight_tile(weight, rows, is_row, inputs, is_input, num_inputs):
    """Bytes [BLOCK_K, N] of rows [N] of a weight that lies row by row."""
    mask = is_row[None, :] & is_input[:, None]
    return tl.load(weight + rows[None, :] * num_inputs + inputs[:, None], mask=mask, other=0)


@triton.jit
def e2m1_of(codes):
    """Twice the e2m1 numbers that the low four bits of bytes stand for, int8."""
    steps = codes & 7
    magnitude = tl.maximum(steps, tl.maximum(2 * steps - 4, 4 * steps - 16))
    return tl.where((codes & 8) != 0, -magnitude, magnitude).to(tl.int8)


@triton.jit
def product(a, w, sums, INPUTS: tl.constexpr, IS_FP8: tl.constexpr, HAS_FP8: tl.constexpr):
    """sums + a @ w: exact in int32, or in float32. Of e4m3 that is not native,
    divided by 256 once for each factor."""
    if INPUTS == INT8_INPUTS:
        sums = tl.dot(a, w, sums, out_dtype=tl.int32)
    elif IS_FP8:
        if INPUTS == FLOAT_INPUTS:
            FORMAT: tl.constexpr = NATIVE_FP8_FORMAT if HAS_FP8 else FP8_FORMAT
            sums = tl.dot(a, row_elements(w, a.dtype, FORMAT), sums, input_precision="ieee")
        elif HAS_FP8:
            # With the argument, or Triton adds within the instruction on 8.9.
            e4m3 = (a.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True))
            sums += tl.dot(e4m3[0], e4m3[1], max_num_imprecise_acc=a.shape[1])
        else:
            sums = tl.dot(
                row_elements(a, tl.bfloat16, FP8_FORMAT),
                row_elements(w, tl.bfloat16, FP8_FORMAT),
                sums,
            )
    else:
        sums = tl.dot(a, w.to(tl.float32).to(a.dtype), sums, input_precision="ieee")
    return sums


@triton.jit
def add_group(
    total, sums, input_sums, scales, offsets, where, is_column, HAS_OFFSETS: tl.constexpr
):
    """total + scale * sums, then + offset * input_sums."""
    total += tl.load(scales + where, mask=is_column, other=0.0)[None, :] * sums.to(tl.float32)
    if HAS_OFFSETS:
        total += (
            tl.load(offsets + where, mask=is_column, other=0.0)[None, :]
            * input_sums.to(tl.float32)[:, None]
        )
    return total


@triton.jit
def group_sums(
    x, weight, rows, is_row, columns, is_column, pairs, is_pair, begin, end, num_inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr,
    INPUTS: tl.constexpr, IS_FP8: tl.constexpr, HAS_FP8: tl.constexpr, IS_MXFP4: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Sums [M, N] of inputs times weights over inputs [begin, end), which share their scales,
    and sums [M] of inputs alone."""
    SUM_TYPE: tl.constexpr = tl.int32 if INPUTS == INT8_INPUTS else tl.float32
    HALF: tl.constexpr = BLOCK_N // 2
    PER_FACTOR: tl.constexpr = 256.0 if IS_FP8 and not HAS_FP8 else 1.0
    UNIT: tl.constexpr = PER_FACTOR * PER_FACTOR if INPUTS == FP8_INPUTS else PER_FACTOR
    sums = tl.zeros([BLOCK_M, HALF if BITS == 4 else BLOCK_N], SUM_TYPE)
    other_sums = tl.zeros([BLOCK_M, HALF], SUM_TYPE)
    input_sums = tl.zeros([BLOCK_M], SUM_TYPE)
    for first in range(begin, end, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        is_input = inputs < end
        a = tl.load(
            x + rows[:, None] * num_inputs + inputs[None, :],
            mask=is_row[:, None] & is_input[None, :],
            other=0,
        )
        if BITS == 4:
            both = weight_tile(weight, pairs, is_pair, inputs, is_input, num_inputs)
            below, above = both << 4, both & -16
            if IS_MXFP4:
                below, above = e2m1_of(both), e2m1_of(both >> 4)
            sums = product(a, below, sums, INPUTS, False, False)
            other_sums = product(a, above, other_sums, INPUTS, False, False)
        else:
            w = weight_tile(weight, columns, is_column, inputs, is_input, num_inputs)
            sums = product(a, w, sums, INPUTS, IS_FP8, HAS_FP8)
        if HAS_OFFSETS:
            input_sums += tl.sum(a.to(SUM_TYPE), axis=1)
    if BITS == 4:
        sums = tl.reshape(tl.join(sums, other_sums), [BLOCK_M, BLOCK_N])
    if UNIT != 1.0:
        sums = sums * UNIT
    return sums, input_sums


@triton.jit
def chunk_sums(
    x, weight, scales, offsets, rows, is_row, columns, is_column, pairs, is_pair, begin, end,
    num_outputs, num_inputs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BITS: tl.constexpr, INPUTS: tl.constexpr, IS_FP8: tl.constexpr,
    HAS_FP8: tl.constexpr, IS_MXFP4: tl.constexpr, HAS_OFFSETS: tl.constexpr, IS_RAW: tl.constexpr,
):  # fmt: skip
    """Over inputs [begin, end): raw sums of a part of the only group,
    or whole groups with their scales, float32."""
    if IS_RAW:
        total, _ = group_sums(
            x, weight, rows, is_row, columns, is_column, pairs, is_pair, begin, end, num_inputs,
            BLOCK_M, BLOCK_N, BLOCK_K, BITS, INPUTS, IS_FP8, HAS_FP8, IS_MXFP4, False,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for group in range(begin // GROUP, end // GROUP):
            sums, input_sums = group_sums(
                x, weight, rows, is_row, columns, is_column, pairs, is_pair, group * GROUP,
                (group + 1) * GROUP, num_inputs, BLOCK_M, BLOCK_N, BLOCK_K, BITS, INPUTS, IS_FP8,
                HAS_FP8, IS_MXFP4, HAS_OFFSETS,
            )  # fmt: skip
            where = group * num_outputs + columns
            total = add_group(
                total, sums, input_sums, scales, offsets, where, is_column, HAS_OFFSETS
            )
    return total


@triton.jit(do_not_specialize=["num_rows"])
def integer_kernel(
    x, x_scales, weight, scales, offsets, bias, out, num_rows, num_outputs, num_inputs,
    GROUP: tl.constexpr, SPLIT_LEN: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr,
    INPUTS: tl.constexpr, IS_FP8: tl.constexpr, HAS_FP8: tl.constexpr, IS_MXFP4: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_RAW: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, chunks (one unless IS_PARTIAL). Pairs with 4 bits or an ACTIVATION of 0 or
    more; scales and offsets are [K / GROUP, N]. IS_PARTIAL stores a chunk alone to out
    [chunks, T, N], for `scale_kernel`.
    """
    IS_PAIR: tl.constexpr = (ACTIVATION >= 0) or (BITS == 4)
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_PAIR else BLOCK_N
    num_columns = (num_outputs + 1) // 2 if IS_PAIR else num_outputs
    row_tile, column_tile = tile_of(num_rows, num_columns, BLOCK_M, WIDTH)
    rows = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns, is_column = columns_of(column_tile, num_outputs, BLOCK_N, IS_PAIR)
    pairs, is_pair = columns_of(column_tile, num_columns, BLOCK_N // 2, False)
    is_row = rows < num_rows
    first = tl.program_id(1) * SPLIT_LEN if IS_PARTIAL else 0
    total = chunk_sums(
        x, weight, scales, offsets, rows, is_row, columns, is_column, pairs, is_pair, first,
        tl.minimum(first + SPLIT_LEN, num_inputs), num_outputs, num_inputs,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_K, BITS, INPUTS, IS_FP8, HAS_FP8, IS_MXFP4, HAS_OFFSETS,
        IS_RAW,
    )  # fmt: skip
    if IS_PARTIAL:
        out += tl.program_id(1).to(tl.int64) * num_rows * num_outputs
    else:
        for split in range(1, NUM_SPLITS):
            total += chunk_sums(
                x, weight, scales, offsets, rows, is_row, columns, is_column, pairs, is_pair,
                split * SPLIT_LEN, tl.minimum((split + 1) * SPLIT_LEN, num_inputs), num_outputs,
                num_inputs,
                GROUP, BLOCK_M, BLOCK_N, BLOCK_K, BITS, INPUTS, IS_FP8, HAS_FP8, IS_MXFP4,
                HAS_OFFSETS, IS_RAW,
            )  # fmt: skip
        if IS_RAW:
            # no -0
            total = (
                tl.load(scales + columns, mask=is_column, other=0.0)[None, :] * total.to(tl.float32)
                + 0.0
            )
        if INPUTS != FLOAT_INPUTS:
            total = total * tl.load(x_scales + rows, mask=is_row, other=0.0)[:, None]
        total = with_bias(total, bias, columns, is_column, HAS_BIAS)
    store_outputs(
        out, rows, is_row, column_tile, total, num_outputs // 2 if ACTIVATION >= 0 else num_outputs,
        BLOCK_M, BLOCK_N, BITS, ACTIVATION,
    )  # fmt: skip


@triton.jit
def store_outputs(
    out, rows, is_row, tile, total, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BITS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A finished tile of sums to rows of out [T, width]: of pairs their gated product, or, where
    two outputs share a byte, both; else as it is."""
    if ACTIVATION >= 0:
        gate, up = halves_of(total, BLOCK_M, BLOCK_N)
        gated = gated_product(gate, up, ACTIVATION)
        store_columns(out, rows, is_row, tile, gated, width, 0, width, BLOCK_N // 2)
    elif BITS == 4:
        below, above = halves_of(total, BLOCK_M, BLOCK_N)
        half = (width + 1) // 2
        store_columns(out, rows, is_row, tile, below, half, 0, width, BLOCK_N // 2)
        store_columns(out, rows, is_row, tile, above, width - half, half, width, BLOCK_N // 2)
    else:
        store_columns(out, rows, is_row, tile, total, width, 0, width, BLOCK_N)


@triton.jit
def store_columns(
    out, rows, is_row, tile, values, num_columns, first, width, BLOCK_N: tl.constexpr
):
    """A tile [M, N] of `num_columns` columns, of which column 0 is `first` of out [T, width]."""
    columns, is_column = columns_of(tile, num_columns, BLOCK_N, False)
    there = out + rows[:, None] * width + first + columns[None, :]
    tl.store(there, values.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["stride"])
def scale_kernel(
    sums, x_scales, scales, bias, out, num_outputs, stride, NUM_SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_X_SCALES: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row program_id(0) of sums [chunks, T, N], of `integer_kernel` or a library, to what
    `integer_kernel` makes of them.

    HAS_SCALES: they are raw. HAS_X_SCALES: inputs were quantized.
    """
    IS_PAIR: tl.constexpr = ACTIVATION >= 0
    num_columns = num_outputs // 2 if IS_PAIR else num_outputs
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    row_scale = tl.load(x_scales + row) if HAS_X_SCALES else 1.0
    there = sums + row * num_outputs
    total = scaled_sums(
        there,
        row_scale,
        scales,
        bias,
        columns,
        is_column,
        stride,
        NUM_SPLITS,
        HAS_X_SCALES,
        HAS_SCALES,
        HAS_BIAS,
    )
    if IS_PAIR:
        others = columns + num_columns
        up = scaled_sums(
            there,
            row_scale,
            scales,
            bias,
            others,
            is_column,
            stride,
            NUM_SPLITS,
            HAS_X_SCALES,
            HAS_SCALES,
            HAS_BIAS,
        )
        total = gated_product(total, up, ACTIVATION)
    tl.store(out + row * num_columns + columns, total.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def scaled_sums(
    sums, row_scale, scales, bias, columns, is_column, stride, NUM_SPLITS: tl.constexpr,
    HAS_X_SCALES: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Chunks of sums[columns], added, with their scales and bias, float32."""
    total = add_partials(sums + columns, is_column, stride, NUM_SPLITS).to(tl.float32)
    if HAS_SCALES:
        total = tl.load(scales + columns, mask=is_column, other=0.0) * total + 0.0
    if HAS_X_SCALES:
        total = total * row_scale
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    return total
