"""Rows of the KV cache in each of its formats, as Triton functions: how one is stored, and how its
elements are read.

Owns the bytes (`Kernels.write_kv` says what they mean): elements, and of int8 and fp8 a float32
scale behind them. e4m3 is put together as integers everywhere, and taken apart so where there is no
instruction for it (below capability 8.9): the same bytes and, as nothing is rounded, the same
numbers but for a power of two, which `row_scales` gives back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT_FORMAT, INT8_FORMAT, FP8_FORMAT, NATIVE_FP8_FORMAT = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(3),
)
_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}


def kernel_view(cache: Tensor, *, has_fp8: bool = False) -> tuple[Tensor, Tensor, int]:
    """(elements, scales, format) of a cache: fp8 as bytes, and the same memory once more as float32
    where scales lie in it.

    `has_fp8`: the device has instructions that take e4m3 apart.
    """
    form = _FORMATS.get(cache.dtype, 0)
    if form == 0:
        return cache, cache, form
    if form == 1:
        return cache, cache.view(torch.float32), form
    return cache.view(torch.uint8), cache.view(torch.float32), 3 if has_fp8 else form


@triton.jit
def e4m3_bits(x):
    """float32 of a magnitude up to 448 to the nearest e4m3 number, ties to even,
    as a byte in int32."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # below 2**-6 it counts in steps of 2**-9; see `quantize_kernel`
    steps = (tl.abs(x) * 512.0 + 12582912.0) - 12582912.0
    code = tl.where(tl.abs(x) < 0.015625, steps.to(tl.int32), rounded - 960)
    return (code & 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def row_elements(stored, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Stored elements in `dtype`, without their scale; FP8_FORMAT divided by 256, which
    `row_scales` gives back. Nothing is rounded but float32 for narrower queries.
    """
    if FORMAT == FP8_FORMAT:
        wide = stored.to(tl.int16)
        halves = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
        elements = halves.to(dtype)
    elif FORMAT == NATIVE_FP8_FORMAT:
        elements = stored.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FORMAT == INT8_FORMAT:
        elements = stored.to(tl.float32).to(dtype)
    else:
        elements = stored.to(dtype)
    return elements


@triton.jit
def row_scales(scales, rows, is_there, HEAD_SIZE: tl.constexpr, FORMAT: tl.constexpr):
    """float32 scales of the rows that begin at bytes `rows`; zero where not `is_there`."""
    found = tl.load(scales + (rows + HEAD_SIZE) // 4, mask=is_there, other=0.0)
    if FORMAT == FP8_FORMAT:
        found = found * 256.0
    return found


@triton.jit
def store_row(cache, scales, row, x, dims, is_dim, HEAD_SIZE: tl.constexpr, FORMAT: tl.constexpr):
    """Row number `row` of a cache of rows: x, zero where not `is_dim`, in its format.
    What is not finite gets the scale NaN."""
    if FORMAT == FLOAT_FORMAT:
        tl.store(cache + row * HEAD_SIZE + dims, x.to(cache.dtype.element_ty), mask=is_dim)
    else:
        LARGEST: tl.constexpr = 127.0 if FORMAT == INT8_FORMAT else 448.0
        wide = x.to(tl.float32)
        most = tl.max(tl.abs(wide), axis=0)
        is_broken = tl.max((tl.abs(wide) < float("inf")).to(tl.int32) ^ 1, axis=0) > 0
        scale = tl.maximum(tl.div_rn(most, LARGEST), 1.1754943508222875e-38)
        scale = tl.where(is_broken, 1.0, scale)
        quotient = tl.div_rn(
            tl.where(is_broken, 0.0, wide), tl.zeros(wide.shape, tl.float32) + scale
        )
        there = cache + row * (HEAD_SIZE + 4) + dims
        if FORMAT == INT8_FORMAT:
            nearest = (quotient + 12582912.0) - 12582912.0
            tl.store(there, nearest.to(tl.int8), mask=is_dim)
        else:
            tl.store(there, e4m3_bits(quotient).to(tl.uint8), mask=is_dim)
        tl.store(
            scales + (row * (HEAD_SIZE + 4) + HEAD_SIZE) // 4,
            tl.where(is_broken, float("nan"), scale),
        )
