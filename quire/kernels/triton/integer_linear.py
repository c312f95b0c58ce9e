"""Projections of integers: packing, and calls into the kernels of `integer_gemm`. They have not run on a GPU yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quire.kernels.interface import QuantizedWeight
from quire.kernels.triton.checks import check_floats, launch_options, require
from quire.kernels.triton.integer_gemm import integer_kernel, quantize_kernel
from quire.kernels.triton.linear import check_inputs
from quire.kernels.triton.tuning import LinearTuning, Tuning

_MIN_BLOCK_K = 32
"""What an 8-bit matrix instruction takes at least."""
_QUANTIZE_BLOCK = 2048


@dataclass(slots=True)
class IntegerLinear:
    """A quantized weight on the device. Implements `PackedLinear`."""

    values: Tensor
    """int8 [N, K], or two outputs to a byte, [ceil(N / 2), K]: see `integer_gemm`."""
    scales: Tensor
    """float32 [K / group size, N]"""
    offsets: Tensor | None
    bias: Tensor | None
    bits: int
    group_size: int
    has_int8_inputs: bool
    num_outputs: int
    num_inputs: int
    tuning: LinearTuning

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(each.nbytes for each in (self.values, self.scales, self.offsets, self.bias) if each is not None)


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None, tuning: Tuning, device: torch.device) -> IntegerLinear:
    """To the device, packed; ValueError where shapes do not fit together or a value does not fit its bits."""
    _check(weight, bias)
    values = weight.values if weight.bits == 8 else pack_nibbles(weight.values)
    offsets = None if weight.offsets is None else weight.offsets.t().contiguous().to(device)
    return IntegerLinear(
        values=values.contiguous().to(device),
        scales=weight.scales.t().contiguous().to(device),
        offsets=offsets,
        bias=None if bias is None else bias.contiguous().to(device),
        bits=weight.bits,
        group_size=weight.group_size,
        has_int8_inputs=weight.activations == "int8",
        num_outputs=weight.values.shape[0],
        num_inputs=weight.values.shape[1],
        tuning=tuning.integer,
    )


def pack_nibbles(values: Tensor) -> Tensor:
    """int8 [N, K] of -8 ... 7 to bytes int8 [ceil(N / 2), K]: output j below, output ceil(N / 2) + j above."""
    half = (values.shape[0] + 1) // 2
    above = torch.zeros_like(values[:half])
    above[: values.shape[0] - half] = values[half:]
    return (values[:half] & 15) | (above << 4)


def _check(weight: QuantizedWeight, bias: Tensor | None) -> None:
    values, size = weight.values, weight.group_size
    require(values.dim() == 2 and values.dtype == torch.int8, "pack_quantized: expected int8 values [N, K]", values)
    if size < 1 or values.shape[1] % size:
        raise ValueError(f"pack_quantized: group size {size} does not divide the {values.shape[1]} inputs")
    grid = (values.shape[0], values.shape[1] // size)
    for tensor in (weight.scales, weight.offsets):
        fits = tensor is None or (tensor.shape == grid and tensor.dtype == torch.float32)
        require(fits, f"pack_quantized: expected float32 scales and offsets {list(grid)}", tensor)
    require(bias is None or bias.shape == grid[:1], f"pack_quantized: expected bias [{grid[0]}]", bias)
    if weight.bits == 4 and values.numel() and (int(values.min()) < -8 or int(values.max()) > 7):
        raise ValueError(f"pack_quantized: values from {int(values.min())} to {int(values.max())}; 4 bits hold -8 to 7")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [T, K] to int8 [T, K] and float32 scales [T], as `QuantizedWeight` says, to the bit."""
    check_floats(x, "x")
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        block = min(_QUANTIZE_BLOCK, triton.next_power_of_2(x.shape[1]))
        quantize_kernel[(x.shape[0],)](x, values, scales, x.shape[1], BLOCK=block, **launch_options(4))
    return values, scales


def integer_linear(x: Tensor, packed: IntegerLinear, activation: int, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T + bias`, or of a pair its gated product, rounded once to `dtype`."""
    check_inputs(x, packed)
    num_rows, tuning = x.shape[0], packed.tuning
    is_gated = activation >= 0
    num_columns = packed.num_outputs // 2 if is_gated else packed.num_outputs
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=x.device)
    if not num_rows:
        return out
    inputs, input_scales = quantize_rows(x) if packed.has_int8_inputs else (x, packed.scales)
    tile_columns = (packed.num_outputs + 1) // 2 if is_gated or packed.bits == 4 else packed.num_outputs
    num_tiles = triton.cdiv(num_rows, tuning.block_m) * triton.cdiv(tile_columns, tuning.block_n)
    block_k = max(_MIN_BLOCK_K, min(tuning.block_k, triton.next_power_of_2(packed.group_size)))
    integer_kernel[(num_tiles,)](
        inputs, input_scales, packed.values, packed.scales,
        packed.scales if packed.offsets is None else packed.offsets,
        packed.scales if packed.bias is None else packed.bias,
        out, num_rows, packed.num_outputs, packed.num_inputs,
        GROUP=packed.group_size, BLOCK_M=tuning.block_m, BLOCK_N=tuning.block_n, BLOCK_K=block_k, BITS=packed.bits,
        ACTIVATION=activation, IS_INT8=packed.has_int8_inputs, HAS_OFFSETS=packed.offsets is not None,
        HAS_BIAS=packed.bias is not None, **launch_options(tuning.num_warps, tuning.num_stages),
    )  # fmt: skip
    return out
