"""Reference projections: one matrix-vector product per row,
of float weights or of integers with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.interface import PackedLinear, QuantizedWeight
from quire.kernels.reference import elementwise
from quire.kernels.reference.sampling import ReferenceSampling
from quire.program.operations import Gating


@dataclass(slots=True)
class ReferenceLinear:
    """A weight as it came, [N, K], and its bias, [N] or None. Implements `PackedLinear`."""

    weight: Tensor
    bias: Tensor | None
    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of memory held."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `PackedLinear.tensors`."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def product(self, row: Tensor) -> Tensor:
        """float32 [K] -> float32 [N]"""
        return torch.mv(self.weight.float(), row)


@dataclass(slots=True)
class ReferenceQuantizedLinear:
    """A quantized weight as it came, and its bias, [N] or None. Implements `PackedLinear`."""

    weight: QuantizedWeight
    bias: Tensor | None
    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of memory held."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `PackedLinear.tensors`."""
        held = (self.weight.values, self.weight.scales, self.weight.offsets, self.bias)
        return tuple(tensor for tensor in held if tensor is not None)

    def product(self, row: Tensor) -> Tensor:
        """float32 [K] -> float32 [N]"""
        if self.weight.activations == "float":
            return torch.mv(dequantized(self.weight), row)
        if self.weight.activations == "fp8":
            return self._fp8_product(*quantize_row_fp8(row))
        quantized, scale = quantize_row(row)
        return self._integer_product(quantized) * scale

    def _fp8_product(self, row: Tensor, scale: Tensor) -> Tensor:
        """e4m3 numbers in float32 [K] -> float32 [N], groups added in ascending order."""
        weight, size = self.weight, self.weight.group_size
        total = torch.zeros(self.num_outputs)
        for group, inputs in enumerate(row.view(-1, size)):
            total += weight.scales[:, group] * torch.mv(
                weight.values[:, group * size : (group + 1) * size].float(), inputs
            )
        return total * scale

    def _integer_product(self, quantized: Tensor) -> Tensor:
        """int32 [K] -> float32 [N]: exact sums within each group,
        groups added in ascending order."""
        weight, size = self.weight, self.weight.group_size
        total = torch.zeros(self.num_outputs)
        for group in range(self.num_inputs // size):
            inputs = quantized[group * size : (group + 1) * size].to(torch.float64)
            sums = torch.mv(
                weight.values[:, group * size : (group + 1) * size].to(torch.float64), inputs
            )
            total += weight.scales[:, group] * sums.float()
            if weight.offsets is not None:
                total += weight.offsets[:, group] * inputs.sum().float()
        return total


def quantize_row(row: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [K] to int32 [K] in -127 ... 127 and the float32 scale that brings them back.

    A row whose scale would be no normal number becomes zeros, scale 0; a row that is not finite
    zeros, scale not a number.
    """
    scale = row.abs().max() / 127
    if not row.isfinite().all():
        return torch.zeros_like(row, dtype=torch.int32), torch.full_like(scale, torch.nan)
    if scale < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(row, dtype=torch.int32), torch.zeros_like(scale)
    return torch.round(row / scale).to(torch.int32), scale


def quantize_row_fp8(row: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [K] to e4m3 numbers in float32 [K] and the float32 scale that brings them back;
    see `Kernels.write_kv`."""
    scale = (row.abs().max() / 448).clamp(min=2.0**-126)
    if not row.isfinite().all():
        return torch.zeros_like(row), torch.full_like(scale, torch.nan)
    return (row / scale).to(torch.float8_e4m3fn).float(), scale


def dequantized(weight: QuantizedWeight) -> Tensor:
    """float32 [N, K]"""
    scales = weight.scales.repeat_interleave(weight.group_size, dim=1)
    product = weight.values.float() * scales
    return (
        product
        if weight.offsets is None
        else product + weight.offsets.repeat_interleave(weight.group_size, dim=1)
    )


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None = None) -> ReferenceQuantizedLinear:
    """Keep the tensors; raises ValueError where their shapes do not fit together."""
    check_quantized(weight, bias)
    return ReferenceQuantizedLinear(weight, bias, *weight.values.shape)


def check_quantized(weight: QuantizedWeight, bias: Tensor | None) -> None:
    """Raise ValueError unless shapes, dtypes and group size are as `QuantizedWeight` says."""
    values, size = weight.values, weight.group_size
    if values.dim() != 2 or not (weight.is_fp8 or values.dtype == torch.int8):
        raise ValueError(f"expected int8 or e4m3 values [N, K], got {values.dtype} {shape(values)}")
    check_kind(weight)
    if size < 1 or values.shape[1] % size:
        raise ValueError(f"group size {size} does not divide the {values.shape[1]} inputs")
    grid = (values.shape[0], values.shape[1] // size)
    for name, tensor in (("scales", weight.scales), ("offsets", weight.offsets)):
        if tensor is not None and (tensor.shape != grid or tensor.dtype != torch.float32):
            raise ValueError(
                f"expected float32 {name} {list(grid)}, got {tensor.dtype} {shape(tensor)}"
            )
    if bias is not None and bias.shape != grid[:1]:
        raise ValueError(f"expected bias [{grid[0]}], got {shape(bias)}")


def check_kind(weight: QuantizedWeight) -> None:
    """Raise ValueError unless values, bits, offsets and activations go together."""
    if weight.is_mxfp4 and (weight.bits != 4 or weight.offsets is not None):
        raise ValueError("mxfp4 values have 4 bits and no offsets")
    if weight.is_mxfp4 and (weight.is_fp8 or weight.activations != "float"):
        raise ValueError("mxfp4 values are multiplied by inputs in floating point")
    if weight.is_fp8 and (
        weight.bits != 8 or weight.offsets is not None or weight.activations == "int8"
    ):
        raise ValueError("e4m3 values have 8 bits, no offsets, and inputs in fp8 or floating point")
    if weight.activations == "fp8" and not weight.is_fp8:
        raise ValueError("inputs in fp8 need a weight of e4m3 values")


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
    """Keep the tensors; raises ValueError unless weight is [N, K] and bias [N]."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"expected weight [N, K] and bias [N], got {shape(weight)} and {shape(bias)}"
        )
    return ReferenceLinear(weight.contiguous(), bias, weight.shape[0], weight.shape[1])


def table_of(weight: PackedLinear) -> Tensor | None:
    """Return the weight itself, which is kept as it came."""
    return weight.weight if isinstance(weight, ReferenceLinear) else None


def linear(x: Tensor, weight: PackedLinear, *, out_dtype: str | None = None) -> Tensor:
    """`x [T, K] -> [T, N]`: each row alone in float32, rounded once."""
    if not isinstance(weight, ReferenceLinear | ReferenceQuantizedLinear):
        raise TypeError(
            f"linear: the weight was packed by another back end ({type(weight).__name__})"
        )
    if x.dim() != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"linear: x is {shape(x)} but the weight has {weight.num_inputs} inputs")
    dtype = x.dtype if out_dtype is None else getattr(torch, out_dtype)
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=dtype, device=x.device)
    for index, row in enumerate(x.float()):
        # a fresh row: the same alignment, so the same code path, for every row
        product = weight.product(row.clone())
        out[index] = product if weight.bias is None else product + weight.bias.float()
    return out


def gated_linear(x: Tensor, weight: PackedLinear, activation: Gating) -> Tensor:
    """`linear` without rounding, then `gated`, then rounded: [T, K] -> [T, F] of a weight [2 * F,
    K]."""
    if weight.num_outputs % 2:
        raise ValueError(
            f"gated_linear: the weight has {weight.num_outputs} outputs; expected as many "
            "for gate as for up"
        )
    return elementwise.gated(linear(x, weight, out_dtype="float32"), activation).to(x.dtype)


def linear_argmax(x: Tensor, weight: PackedLinear) -> tuple[Tensor, Tensor]:
    """`linear` in float32, then its largest."""
    return ReferenceSampling().argmax(linear(x, weight, out_dtype="float32"))


def shape(tensor: Tensor | None) -> list[int] | None:
    """Return a shape for messages."""
    return None if tensor is None else list(tensor.shape)
