"""Projections: packed weights, and calls into the kernels of `gemm` and `integer_gemm`. They have
not run on a GPU yet.

Owns how many split-K chunks there are (see `gemm`), which follows from the weight's shape and
the tuning alone; and when torch's own product (cuBLAS) is used in place of the kernels, whose bits
may depend on the number of rows: from so many rows on as the tuning file says, and only where the
engine was told that results may depend on batch composition.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from quire.kernels.interface import PackedLinear
from quire.kernels.triton.activation import NO_ACTIVATION
from quire.kernels.triton.checks import FLOATS, check_floats, launch_options, require
from quire.kernels.triton.gemm import finish_kernel, linear_kernel, tile_argmax_kernel
from quire.kernels.triton.row_argmax import argmax_of_rows
from quire.kernels.triton.tuning import LinearTuning, Tuning
from quire.kernels.triton.unfinished import PartialSums, source_of
from quire.program.operations import Gating, gating_code

_MIN_SPLIT_BLOCKS = 4
"""A chunk of a sum has at least so many steps of block_k,
or its start and end would cost more than it."""
_FINISH_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ProductOptions:
    """What projections may use beside the kernels of this package."""

    min_library_rows: int | None = None
    """Rows from which torch multiplies floats; None: never."""
    min_scaled_rows: int | None = None
    """Rows from which torch multiplies e4m3; None: never."""
    has_fp8: bool = False
    """The device has matrix instructions for e4m3."""


@dataclass(slots=True)
class FloatLinear:
    """A weight [N, K] row by row, and its bias. Implements `PackedLinear`."""

    weight: Tensor
    bias: Tensor | None
    tuning: LinearTuning
    num_outputs: int = field(init=False)
    num_inputs: int = field(init=False)
    split_len: int = field(init=False)
    num_splits: int = field(init=False)
    num_programs: int = 128
    options: ProductOptions = field(default_factory=ProductOptions)

    def __post_init__(self) -> None:
        self.num_outputs, self.num_inputs = self.weight.shape
        self.split_len, self.num_splits = split_inputs(
            self.weight.shape[0], self.weight.shape[1], self.tuning, self.num_programs
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `PackedLinear.tensors`."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def split_inputs(
    num_outputs: int,
    num_inputs: int,
    tuning: LinearTuning,
    num_programs: int,
    unit: int | None = None,
) -> tuple[int, int]:
    """(length of a chunk, number of chunks) so that one tile of rows makes about
    `num_programs` programs.

    A chunk is whole units of inputs, those of one step unless it is said otherwise.
    """
    unit = unit or tuning.block_k
    num_units = triton.cdiv(num_inputs, unit)
    wanted = num_programs // triton.cdiv(num_outputs, tuning.block_n)
    num_splits = max(
        1, min(wanted, num_units * unit // (tuning.block_k * _MIN_SPLIT_BLOCKS), num_units)
    )
    split_len = triton.cdiv(num_units, num_splits) * unit
    return split_len, triton.cdiv(num_inputs, split_len)


def pack_linear(
    weight: Tensor,
    bias: Tensor | None,
    tuning: Tuning,
    device: torch.device,
    options: ProductOptions,
) -> FloatLinear:
    """Copy a weight to the device, as it is; ValueError unless weight is [N, K] and bias [N]."""
    require(
        weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1]),
        "expected weight [N, K], bias [N]",
        weight,
        bias,
    )
    if weight.dtype not in FLOATS:
        raise TypeError(
            f"pack_linear: the weight is {weight.dtype}; the Triton kernels take float32, "
            "bfloat16 and float16"
        )
    figures = tuning.wide_linear if weight.dtype == torch.float32 else tuning.linear
    moved = None if bias is None else bias.to(device).contiguous()
    there = weight.to(device).contiguous()
    return FloatLinear(there, moved, figures, num_programs=tuning.num_programs, options=options)


def float_linear(x: Tensor, packed: FloatLinear, activation: int, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T + bias`, or of a pair its gated product, rounded once to `dtype`."""
    _check_alike(x, packed)
    num_rows = x.shape[0]
    num_columns = packed.num_outputs // 2 if activation >= 0 else packed.num_outputs
    if num_rows and _is_for_library(packed, num_rows):
        if activation == NO_ACTIVATION and packed.bias is None and dtype == x.dtype:
            return torch.mm(x, packed.weight.t())
        return finish(
            PartialSums(library_sums(x, packed.weight).unsqueeze(0), packed.bias, dtype), activation
        )
    if num_rows and _is_apart(packed, num_rows):
        return finish(PartialSums(_partial_sums(x, packed), packed.bias, dtype), activation)
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=x.device)
    if num_rows:
        _launch(x, packed, out, activation, is_partial=False)
    return out


def unfinished_linear(x: Tensor, packed: FloatLinear) -> PartialSums | None:
    """Return the GEMM before its split-K reduction; None where it is not split."""
    _check_alike(x, packed)
    if not x.shape[0] or _is_for_library(packed, x.shape[0]) or not _is_apart(packed, x.shape[0]):
        return None
    return PartialSums(_partial_sums(x, packed), packed.bias, x.dtype)


def finish(product: PartialSums, activation: int = NO_ACTIVATION) -> Tensor:
    """Add the chunks in ascending order, then bias, then the gated activation; round once."""
    _, num_rows, num_outputs = product.partial.shape
    num_columns = num_outputs // 2 if activation >= 0 else num_outputs
    out = torch.empty((num_rows, num_columns), dtype=product.dtype, device=product.partial.device)
    source = source_of(product)
    finish_kernel[(num_rows, triton.cdiv(num_columns, _FINISH_BLOCK))](
        source.values, source.bias, out, num_rows, num_outputs, NUM_SPLITS=source.num_splits,
        BLOCK=_FINISH_BLOCK, ACTIVATION=activation, HAS_BIAS=source.has_bias,
        **launch_options(num_warps=4),
    )  # fmt: skip
    return out


def _is_for_library(packed: FloatLinear, num_rows: int) -> bool:
    least = packed.options.min_library_rows
    return least is not None and num_rows >= least


def _is_apart(packed: FloatLinear, num_rows: int) -> bool:
    """Return whether chunks are computed in parallel."""
    return packed.num_splits > 1 and num_rows <= packed.tuning.max_partial_rows


def _partial_sums(x: Tensor, packed: FloatLinear) -> Tensor:
    """float32 [chunks, T, N]"""
    partial = torch.empty(
        (packed.num_splits, x.shape[0], packed.num_outputs), dtype=torch.float32, device=x.device
    )
    _launch(x, packed, partial, NO_ACTIVATION, is_partial=True)
    return partial


def library_sums(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] @ weight.T [K, N] in float32, unrounded, by torch."""
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), weight.float().t())


def _launch(
    x: Tensor, packed: FloatLinear, out: Tensor, activation: int, *, is_partial: bool
) -> None:
    tuning, num_rows = packed.tuning, x.shape[0]
    num_tiles = triton.cdiv(num_rows, tuning.block_m) * triton.cdiv(
        packed.num_outputs, tuning.block_n
    )
    linear_kernel[(num_tiles, packed.num_splits if is_partial else 1)](
        x, packed.weight, _bias(packed), out, num_rows, packed.num_outputs, packed.num_inputs,
        SPLIT_LEN=packed.split_len, NUM_SPLITS=packed.num_splits, BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n, BLOCK_K=tuning.block_k, ACTIVATION=activation,
        IS_PARTIAL=is_partial, HAS_BIAS=packed.bias is not None,
        **launch_options(tuning.num_warps, tuning.num_stages),
    )  # fmt: skip


def float_argmax(x: Tensor, packed: FloatLinear) -> tuple[Tensor, Tensor]:
    """Return each row's largest output: ids int64 [T], values float32 [T]."""
    check_inputs(x, packed)
    tuning, num_rows = packed.tuning, x.shape[0]
    if packed.num_splits > 1 or x.dtype != packed.weight.dtype:
        products = float_linear(x, packed, NO_ACTIVATION, torch.float32)
        return argmax_of_rows(products, None)
    num_tiles = triton.cdiv(packed.num_outputs, tuning.block_n)
    values = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=x.device)
    ids = torch.empty((num_rows, num_tiles), dtype=torch.int64, device=x.device)
    if num_rows:
        tile_argmax_kernel[(triton.cdiv(num_rows, tuning.block_m) * num_tiles,)](
            x, packed.weight, _bias(packed), values, ids, num_rows, packed.num_outputs,
            packed.num_inputs, num_tiles, BLOCK_M=tuning.block_m, BLOCK_N=tuning.block_n,
            BLOCK_K=tuning.block_k, HAS_BIAS=packed.bias is not None,
            **launch_options(tuning.num_warps, tuning.num_stages),
        )  # fmt: skip
    return argmax_of_rows(values, ids)


def _bias(packed: FloatLinear) -> Tensor:
    """Return a tensor in any case: a kernel without bias does not look at it."""
    return packed.weight if packed.bias is None else packed.bias


def check_inputs(x: Tensor, packed: PackedLinear) -> None:
    """ValueError or TypeError unless x is contiguous [T, K] of floats."""
    check_floats(x, "linear: x")
    require(
        x.dim() == 2 and x.shape[1] == packed.num_inputs,
        f"linear: the weight has {packed.num_inputs} inputs",
        x,
    )


def _check_alike(x: Tensor, packed: FloatLinear) -> None:
    check_inputs(x, packed)
    if x.dtype != packed.weight.dtype:
        raise TypeError(f"linear: x is {x.dtype} but the weight {packed.weight.dtype}")


def gated_code(packed: PackedLinear, activation: Gating) -> int:
    """Return the activation's number; ValueError unless the weight is a pair."""
    if packed.num_outputs % 2:
        raise ValueError(
            f"gated_linear: the weight has {packed.num_outputs} outputs; expected as many "
            "for gate as for up"
        )
    return gating_code(activation)
