"""Norms, activations, embedding and the look for numbers that are not finite, in Triton. They have
not run on a GPU yet.

A program computes one row (or a chunk of elements) in float32 and rounds once. A row's sum is
taken over a tile whose size depends on the row's width alone, not on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import activated, gated_product
from quire.kernels.triton.checks import (
    check_floats,
    check_indices,
    launch_options,
    num_warps_for,
    require,
)
from quire.kernels.triton.gemm import finished
from quire.kernels.triton.unfinished import PartialSums, source_of
from quire.program.operations import Activation, Gating, activation_code, gating_code

_BLOCK = 1024


@triton.jit
def normed(
    x,
    is_there,
    weight,
    bias,
    offsets,
    width,
    eps,
    weight_offset,
    IS_LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """RMS norm or layer norm of one row, float32 [BLOCK], zero where not `is_there`."""
    if IS_LAYER:
        mean = tl.div_rn(tl.sum(x, axis=0), width.to(tl.float32))
        x = tl.where(is_there, x - mean, 0.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=0), width.to(tl.float32)) + eps))
    y = (
        x
        * scale
        * (tl.load(weight + offsets, mask=is_there, other=0.0).to(tl.float32) + weight_offset)
    )
    if HAS_BIAS:
        y += tl.load(bias + offsets, mask=is_there, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["stride"])
def norm_kernel(
    x, x_bias, residual, weight, bias, out, total, width, stride, eps, weight_offset,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_LAYER: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_X_BIAS: tl.constexpr,
):  # fmt: skip
    """Row program_id(0): out = norm(x), or with HAS_RESIDUAL total = x + residual, rounded, and out
    = norm(total).

    x may be an unfinished product of NUM_SPLITS chunks: see `gemm.finished`.
    """
    base = tl.program_id(0).to(tl.int64) * width
    offsets = tl.arange(0, BLOCK)
    is_there = offsets < width
    row = finished(
        x,
        x_bias,
        base + offsets,
        offsets,
        is_there,
        stride,
        total.dtype.element_ty,
        NUM_SPLITS,
        HAS_X_BIAS,
    )
    if HAS_RESIDUAL:
        added = (
            row + tl.load(residual + base + offsets, mask=is_there, other=0.0).to(tl.float32)
        ).to(total.dtype.element_ty)
        tl.store(total + base + offsets, added, mask=is_there)
        row = added.to(tl.float32)
    size = tl.zeros([], tl.int32) + width
    y = normed(row, is_there, weight, bias, offsets, size, eps, weight_offset, IS_LAYER, HAS_BIAS)
    tl.store(out + base + offsets, y.to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["count"])
def activate_kernel(x, out, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Elementwise."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = offsets < count
    y = activated(tl.load(x + offsets, mask=is_there, other=0.0).to(tl.float32), KIND)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def gated_kernel(gate_up, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Row program_id(0), chunk program_id(1): out [T, F] of gate_up [T, 2 * F]."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = offsets < width
    gate = tl.load(gate_up + row * 2 * width + offsets, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + offsets, mask=is_there, other=0.0).to(tl.float32)
    tl.store(
        out + row * width + offsets,
        gated_product(gate, up, KIND).to(out.dtype.element_ty),
        mask=is_there,
    )


@triton.jit
def embedding_kernel(token_ids, table, out, num_rows, width, BLOCK: tl.constexpr):
    """Row program_id(0). An id outside the table gives NaN,
    which the worker reports for that sequence."""
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + row)
    is_known = (token_id >= 0) & (token_id < num_rows)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = offsets < width
    found = tl.load(
        table + token_id * width + offsets, mask=is_there & is_known, other=float("nan")
    )
    tl.store(out + row * width + offsets, found, mask=is_there)


@triton.jit
def finite_kernel(x, is_sound, width, BLOCK: tl.constexpr):
    """Row program_id(0) of x [T, H]: whether none of its elements is NaN or infinite."""
    base = x + tl.program_id(0).to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    is_odd = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        value = tl.load(base + first + lanes, mask=first + lanes < width, other=0.0).to(tl.float32)
        # a comparison with NaN is false
        is_odd = is_odd | ((tl.abs(value) < float("inf")).to(tl.int32) ^ 1)
    tl.store(is_sound + tl.program_id(0), tl.max(is_odd, axis=0) == 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """See `Kernels.rms_norm`; the weight may be of another float dtype."""
    return _norm(x, None, weight, None, eps, weight_offset, is_layer=False)[0]


def add_rms_norm(
    x: Tensor | PartialSums,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """See `Kernels.add_rms_norm`: one pass over the rows;
    x may be a deferred split-K result."""
    fits = residual.shape == x.shape and residual.dtype == x.dtype
    require(fits, f"add_rms_norm: x is {x.dtype} {list(x.shape)}, the residual is not", residual)
    check_floats(residual, "residual")
    return _norm(x, residual, weight, None, eps, weight_offset, is_layer=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Kernels.layer_norm`."""
    return _norm(x, None, weight, bias, eps, 0.0, is_layer=True)[0]


def _norm(
    x: Tensor | PartialSums, residual: Tensor | None, weight: Tensor, bias: Tensor | None,
    eps: float, offset: float, *, is_layer: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(normed, sum); the sum is x itself without a residual."""
    source = source_of(x)
    check_floats(source.values, "x")
    width = x.shape[-1]
    require(
        weight.shape == (width,) and (bias is None or bias.shape == (width,)),
        f"expected a norm over {width}",
        weight,
        bias,
    )
    beside = source.values if residual is None else residual
    out = torch.empty_like(beside)
    total = beside if residual is None else torch.empty_like(beside)
    if out.numel():
        block = triton.next_power_of_2(width)
        norm_kernel[(out.numel() // width,)](
            source.values, source.bias, beside, weight, weight if bias is None else bias, out,
            total, width, out.numel(), eps, offset, BLOCK=block, HAS_RESIDUAL=residual is not None,
            IS_LAYER=is_layer, HAS_BIAS=bias is not None, NUM_SPLITS=source.num_splits,
            HAS_X_BIAS=source.has_bias, **launch_options(num_warps_for(block)),
        )  # fmt: skip
    return out, total


def activate(x: Tensor, activation: Activation) -> Tensor:
    """See `Kernels.activate`."""
    check_floats(x, "x")
    out, kind = torch.empty_like(x), activation_code(activation)
    if x.numel():
        activate_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
            x, out, x.numel(), KIND=kind, BLOCK=_BLOCK, **launch_options(4)
        )
    return out


def gated(gate_up: Tensor, activation: Gating) -> Tensor:
    """See `Kernels.gated`."""
    check_floats(gate_up, "gate_up")
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gated: expected [T, 2 * F]", gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, kind = (
        torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device),
        gating_code(activation),
    )
    if out.numel():
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        gated_kernel[grid](gate_up, out, width, KIND=kind, BLOCK=_BLOCK, **launch_options(4))
    return out


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Gather rows of `table [V, H]`; an id outside it gives not-a-numbers,
    as nothing can be raised on the device."""
    check_indices(token_ids, "token_ids", token_ids.numel())
    check_floats(table, "table")
    require(table.dim() == 2, "embedding: expected table [V, H]", table)
    num_rows, width = table.shape
    out = torch.empty((token_ids.numel(), width), dtype=table.dtype, device=table.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        grid = (token_ids.numel(), triton.cdiv(width, block))
        embedding_kernel[grid](
            token_ids, table, out, num_rows, width, BLOCK=block, **launch_options(4)
        )
    return out


def finite_rows(x: Tensor) -> Tensor:
    """See `Kernels.finite_rows`."""
    check_floats(x, "x")
    require(x.dim() == 2, "finite_rows: expected [T, H]", x)
    num_rows, width = x.shape
    is_sound = torch.empty(num_rows, dtype=torch.bool, device=x.device)
    if num_rows:
        block = min(4 * _BLOCK, triton.next_power_of_2(max(1, width)))
        finite_kernel[(num_rows,)](
            x, is_sound, width, BLOCK=block, **launch_options(num_warps_for(block))
        )
    return is_sound


def is_finite(x: Tensor) -> bool:
    """Return whether no element is NaN or infinite. Waits for the device."""
    if not x.numel():
        return True
    return bool(finite_rows(x.reshape(1, -1) if x.dim() < 2 else x.reshape(-1, x.shape[-1])).all())
