"""Projections of integers and of e4m3 numbers: packing, and calls into the kernels of
`integer_gemm`. Not run on a GPU yet.

Sums of e4m3 products may come from a library (torch's `_scaled_mm`, without its scales) from so
many rows on as the tuning file says, where results may depend on batch composition; scales, bias
and activation are this module's in any case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from quire.kernels.interface import InputFormat, QuantizedWeight
from quire.kernels.reference.linear import check_kind
from quire.kernels.triton.activation import NO_ACTIVATION
from quire.kernels.triton.checks import check_floats, launch_options, require
from quire.kernels.triton.integer_gemm import (
    INPUT_CODES,
    integer_kernel,
    quantize_kernel,
    scale_kernel,
)
from quire.kernels.triton.linear import ProductOptions, check_inputs, split_inputs
from quire.kernels.triton.tuning import LinearTuning, Tuning

_MIN_BLOCK_K = 32
"""What an 8-bit matrix instruction takes at least."""
_MAX_NIBBLES = 1 << 17
"""Of a group with int8 inputs: its sum, 16 times as large, has to fit an int32."""
_QUANTIZE_BLOCK = 2048
_SCALE_BLOCK = 1024
_LIBRARY_MULTIPLE = 16
"""Of outputs and inputs, for the library's products of e4m3."""


@dataclass(slots=True)
class IntegerLinear:
    """A quantized weight on the device. Implements `PackedLinear`."""

    values: Tensor
    """int8 [N, K], or two outputs to a byte, [ceil(N / 2), K]: see `integer_gemm`.
    Of e4m3 numbers their bytes, uint8."""
    scales: Tensor
    """float32 [K / group size, N]; of 4 bits a 16th: see `integer_gemm`."""
    offsets: Tensor | None
    bias: Tensor | None
    bits: int
    group_size: int
    activations: InputFormat
    num_outputs: int
    num_inputs: int
    tuning: LinearTuning
    options: ProductOptions
    num_programs: int
    is_mxfp4: bool = False
    num_parts: int = 1
    """Of the outputs: nibbles of each lie apart from those of the others (see `arrange`)."""
    split_len: int = field(init=False)
    num_splits: int = field(init=False)

    def __post_init__(self) -> None:
        self.split_len, self.num_splits = self.num_inputs, 1
        # else the sum is a chain of roundings, group by group
        if self.is_raw or self.activations != "int8":
            unit = self.block_k if self.is_raw else math.lcm(self.group_size, self.block_k)
            self.split_len, self.num_splits = split_inputs(
                self.num_outputs, self.num_inputs, self.tuning, self.num_programs, unit
            )

    @property
    def is_raw(self) -> bool:
        """Whether sums are complete before they are scaled:
        with one scale per output and no offset."""
        return self.group_size == self.num_inputs and self.offsets is None

    @property
    def block_k(self) -> int:
        """Inputs of one step, all of one group."""
        return max(_MIN_BLOCK_K, min(self.tuning.block_k, triton.next_power_of_2(self.group_size)))

    def arrange(self, num_parts: int) -> None:
        """Bring nibbles into the order in which each of so many parts of the outputs (experts) is
        packed as a weight of its own."""
        if self.num_parts == num_parts:
            return
        if self.bits == 4:
            size = self.num_outputs // self.num_parts
            bytes_of = self.values.view(self.num_parts, -1, self.num_inputs)
            both = torch.cat([bytes_of & 15, (bytes_of >> 4) & 15], dim=1)[:, :size]
            parts = both.reshape(num_parts, -1, self.num_inputs)
            self.values = torch.cat([pack_nibbles(part) for part in parts])
        self.num_parts = num_parts

    @property
    def is_fp8(self) -> bool:
        """Whether the values are e4m3 numbers."""
        return self.values.dtype is torch.uint8

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(each.nbytes for each in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `PackedLinear.tensors`."""
        held = (self.values, self.scales, self.offsets, self.bias)
        return tuple(each for each in held if each is not None)


def pack_quantized(
    weight: QuantizedWeight,
    bias: Tensor | None,
    tuning: Tuning,
    device: torch.device,
    options: ProductOptions,
) -> IntegerLinear:
    """Pack a weight on the device; ValueError where shapes do not fit together or a
    value does not fit its bits."""
    _check(weight, bias)
    bytes_of = weight.values.view(torch.uint8) if weight.is_fp8 else weight.values
    if weight.is_mxfp4:
        bytes_of = _e2m1_codes(weight.values)
    values = bytes_of if weight.bits == 8 else pack_nibbles(bytes_of)
    offsets = None if weight.offsets is None else weight.offsets.t().contiguous().to(device)
    has_sixteenths = weight.bits == 4 and not weight.is_mxfp4
    scales = weight.scales / 16 if has_sixteenths else weight.scales
    return IntegerLinear(
        values=values.contiguous().to(device),
        scales=scales.t().contiguous().to(device),
        offsets=offsets,
        bias=None if bias is None else bias.contiguous().to(device),
        bits=weight.bits,
        group_size=weight.group_size,
        activations=weight.activations,
        num_outputs=weight.values.shape[0],
        num_inputs=weight.values.shape[1],
        tuning=tuning.integer,
        options=options,
        num_programs=tuning.num_programs,
        is_mxfp4=weight.is_mxfp4,
    )


def _e2m1_codes(values: Tensor) -> Tensor:
    """Twice e2m1 numbers, int8, to the four bits that stand for them; ValueError for others."""
    codes = torch.full((25,), -1, dtype=torch.int8)
    numbers = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])
    codes[12 - numbers] = torch.arange(8, 16, dtype=torch.int8)
    codes[12 + numbers] = torch.arange(8, dtype=torch.int8)
    is_near = not values.numel() or (int(values.min()) >= -12 and int(values.max()) <= 12)
    found = codes[values.int() + 12] if is_near else codes[:1].expand(1, 1) * 0 - 1
    if found.numel() and int(found.min()) < 0:
        raise ValueError("pack_quantized: mxfp4 holds twice e2m1 numbers: 0, 1, 2, 3, 4, 6, 8, 12")
    return found


def pack_nibbles(values: Tensor) -> Tensor:
    """int8 [N, K] of -8 ... 7 to bytes int8 [ceil(N / 2), K]: output j below, output ceil(N / 2)
    + j above."""
    half = (values.shape[0] + 1) // 2
    above = torch.zeros_like(values[:half])
    above[: values.shape[0] - half] = values[half:]
    return (values[:half] & 15) | (above << 4)


def _check(weight: QuantizedWeight, bias: Tensor | None) -> None:
    values, size = weight.values, weight.group_size
    is_known = values.dtype == torch.int8 or weight.is_fp8
    require(
        values.dim() == 2 and is_known,
        "pack_quantized: expected int8 or e4m3 values [N, K]",
        values,
    )
    check_kind(weight)
    if size < 1 or values.shape[1] % size:
        raise ValueError(
            f"pack_quantized: group size {size} does not divide the {values.shape[1]} inputs"
        )
    grid = (values.shape[0], values.shape[1] // size)
    for tensor in (weight.scales, weight.offsets):
        fits = tensor is None or (tensor.shape == grid and tensor.dtype == torch.float32)
        require(fits, f"pack_quantized: expected float32 scales and offsets {list(grid)}", tensor)
    require(
        bias is None or bias.shape == grid[:1], f"pack_quantized: expected bias [{grid[0]}]", bias
    )
    if weight.bits == 4 and weight.activations == "int8" and size > _MAX_NIBBLES:
        raise ValueError(
            f"pack_quantized: 16 times the sum of {size} products of 4 bits does not fit 32; "
            "make groups smaller"
        )
    is_int4 = weight.bits == 4 and not weight.is_mxfp4
    if is_int4 and values.numel() and (int(values.min()) < -8 or int(values.max()) > 7):
        raise ValueError(
            f"pack_quantized: values from {int(values.min())} to {int(values.max())}; 4 bits "
            "hold -8 to 7"
        )


def quantize_rows(x: Tensor, activations: InputFormat = "int8") -> tuple[Tensor, Tensor]:
    """Floats [T, K] to int8 [T, K], or bytes of e4m3, and float32 scales [T],
    as `QuantizedWeight` says, to the bit."""
    check_floats(x, "x")
    is_fp8 = activations == "fp8"
    values = torch.empty(x.shape, dtype=torch.uint8 if is_fp8 else torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        block = min(_QUANTIZE_BLOCK, triton.next_power_of_2(x.shape[1]))
        quantize_kernel[(x.shape[0],)](
            x, values, scales, x.shape[1], BLOCK=block, IS_FP8=is_fp8, **launch_options(4)
        )
    return values, scales


def integer_linear(x: Tensor, packed: IntegerLinear, activation: int, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T + bias`, or of a pair its gated product, rounded once to `dtype`."""
    check_inputs(x, packed)
    packed.arrange(1)
    num_rows = x.shape[0]
    num_columns = packed.num_outputs // 2 if activation >= 0 else packed.num_outputs
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=x.device)
    if not num_rows:
        return out
    inputs, input_scales = (
        (x, packed.scales)
        if packed.activations == "float"
        else quantize_rows(x, packed.activations)
    )
    if is_for_library(packed, num_rows):
        _scale(
            library_sums(inputs, packed.values).unsqueeze(0), input_scales, packed, out, activation
        )
    elif packed.num_splits > 1 and num_rows <= packed.tuning.max_partial_rows:
        is_exact = packed.activations == "int8"
        shape, kind = (
            (packed.num_splits, num_rows, packed.num_outputs),
            torch.int32 if is_exact else torch.float32,
        )
        chunks = torch.empty(shape, dtype=kind, device=x.device)
        _launch(inputs, input_scales, packed, chunks, NO_ACTIVATION, is_partial=True)
        _scale(chunks, input_scales, packed, out, activation)
    else:
        _launch(inputs, input_scales, packed, out, activation, is_partial=False)
    return out


def _launch(
    inputs: Tensor,
    input_scales: Tensor,
    packed: IntegerLinear,
    out: Tensor,
    activation: int,
    *,
    is_partial: bool,
) -> None:
    tuning, num_rows = packed.tuning, inputs.shape[0]
    num_tiles = triton.cdiv(num_rows, tuning.block_m) * triton.cdiv(
        packed.num_outputs, tuning.block_n
    )
    integer_kernel[(num_tiles, packed.num_splits if is_partial else 1)](
        inputs, input_scales, packed.values, packed.scales,
        packed.scales if packed.offsets is None else packed.offsets,
        packed.scales if packed.bias is None else packed.bias,
        out, num_rows, packed.num_outputs, packed.num_inputs,
        GROUP=packed.group_size, SPLIT_LEN=packed.split_len, NUM_SPLITS=packed.num_splits,
        BLOCK_M=tuning.block_m, BLOCK_N=tuning.block_n, BLOCK_K=packed.block_k, BITS=packed.bits,
        ACTIVATION=activation, INPUTS=INPUT_CODES[packed.activations], IS_FP8=packed.is_fp8,
        HAS_FP8=packed.options.has_fp8, IS_MXFP4=packed.is_mxfp4,
        HAS_OFFSETS=packed.offsets is not None, HAS_BIAS=packed.bias is not None,
        IS_RAW=packed.is_raw, IS_PARTIAL=is_partial,
        **launch_options(tuning.num_warps, tuning.num_stages),
    )  # fmt: skip


def _scale(
    chunks: Tensor, input_scales: Tensor, packed: IntegerLinear, out: Tensor, activation: int
) -> None:
    """Chunks [chunks, T, N], of the kernel or a library, added, scaled and finished."""
    num_rows, num_columns = out.shape
    scale_kernel[(num_rows, triton.cdiv(num_columns, _SCALE_BLOCK))](
        chunks, input_scales, packed.scales,
        packed.scales if packed.bias is None else packed.bias, out,
        packed.num_outputs, num_rows * packed.num_outputs, NUM_SPLITS=chunks.shape[0],
        ACTIVATION=activation, HAS_X_SCALES=packed.activations != "float", HAS_SCALES=packed.is_raw,
        HAS_BIAS=packed.bias is not None, BLOCK=_SCALE_BLOCK, **launch_options(4),
    )  # fmt: skip


def is_for_library(packed: IntegerLinear, num_rows: int) -> bool:
    """Return whether the library computes the sums: of e4m3 with one scale per output,
    from so many rows on."""
    least = packed.options.min_scaled_rows
    is_fit = (
        packed.activations == "fp8"
        and packed.group_size == packed.num_inputs
        and packed.options.has_fp8
    )
    sizes = packed.num_outputs % _LIBRARY_MULTIPLE + packed.num_inputs % _LIBRARY_MULTIPLE
    return is_fit and sizes == 0 and least is not None and num_rows >= least


def library_sums(inputs: Tensor, values: Tensor) -> Tensor:
    """Bytes of e4m3 [T, K] and [N, K] to the sums of their products, float32 [T, N], by torch."""
    a, b = inputs.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
    one = torch.ones((), dtype=torch.float32, device=inputs.device)
    return torch._scaled_mm(
        a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False
    )
