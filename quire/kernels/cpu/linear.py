"""Projections on the CPU: weights packed once into panels of 16 outputs (layout in
csrc/cpu/weight.hpp).

A packed weight is flat bytes, a float32 bias and a `PackedLayout` that says how to read them:
a caller that keeps these three (in a file, mapped back into memory) has the weight again with
`CpuLinear(layout, data, bias)`, without packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.cpu import _native
from quire.kernels.cpu.checks import (
    address,
    float_code,
    indices_address,
    require,
    vector_address,
)
from quire.kernels.host_memory import empty_bytes
from quire.kernels.interface import PackedLinear, QuantizedWeight
from quire.kernels.reference.linear import check_kind
from quire.kernels.sampling import Draws
from quire.program.operations import Gating, gating_code

LAYOUT_VERSION: str = _native.WEIGHT_LAYOUT
"""Bytes packed under another version cannot be read."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How the bytes of a packed weight are read: plain values,
    fit to be stored beside them with `LAYOUT_VERSION`."""

    format: Literal["f32", "bf16", "int8", "int4", "mxfp4"]
    num_outputs: int
    num_inputs: int
    group_size: int
    """Inputs that share a scale; `num_inputs` in the float formats."""
    has_offsets: bool = False
    has_int8_inputs: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the weight takes, without the bias.
        Raises ValueError where no such weight can be."""
        return self.native().num_bytes

    def native(self) -> _native.LinearWeight:
        """Return the extension's form, attached to no memory yet."""
        return _native.LinearWeight(
            self.format,
            self.num_outputs,
            self.num_inputs,
            self.group_size,
            self.has_offsets,
            self.has_int8_inputs,
        )


class CpuLinear:
    """A packed weight: opaque bytes and a bias, float32 [N] or None. Implements `PackedLinear`."""

    __slots__ = ("bias", "data", "layout", "native", "num_inputs", "num_outputs")

    def __init__(self, layout: PackedLayout, data: Tensor, bias: Tensor | None = None) -> None:
        """Takes the tensors as they are: uint8 of `layout.num_bytes`, best aligned to 64 bytes,
        and float32 [N]."""
        self.layout, self.data, self.bias = layout, data, bias
        self.num_outputs, self.num_inputs = layout.num_outputs, layout.num_inputs
        self.native = layout.native()
        if data.dtype != torch.uint8 or data.shape != (self.native.num_bytes,):
            raise ValueError(
                f"packed weight: expected {self.native.num_bytes} bytes, got {data.dtype} "
                f"{list(data.shape)}"
            )
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (self.num_outputs,)):
            raise ValueError(
                f"packed weight: expected bias float32 [{self.num_outputs}], got "
                f"{bias.dtype} {list(bias.shape)}"
            )
        self.native.attach(address(data, "data"), 0 if bias is None else address(bias, "bias"))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory held."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `PackedLinear.tensors`."""
        return (self.data,) if self.bias is None else (self.data, self.bias)


@dataclass(frozen=True, slots=True)
class PackedTable:
    """A float weight as the table that it was packed from. Implements `EmbeddingTable`;
    `embedding` gathers from it."""

    weight: CpuLinear

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.weight.num_outputs, self.weight.num_inputs))

    @property
    def dtype(self) -> torch.dtype:
        return _FLOAT_DTYPES[self.weight.layout.format]


_FLOAT_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def table_of(weight: PackedLinear) -> PackedTable | None:
    """See `Kernels.table_of`: the float formats only move values, so their rows can be had back."""
    return (
        PackedTable(weight)
        if isinstance(weight, CpuLinear) and weight.layout.format in _FLOAT_DTYPES
        else None
    )


def _allocate(layout: PackedLayout, bias: Tensor | None) -> CpuLinear:
    """Return the weight with its bytes still to be written."""
    own_bias = (
        None if bias is None else bias.detach().to("cpu", torch.float32, copy=True).contiguous()
    )
    return CpuLinear(layout, empty_bytes(layout.num_bytes), own_bias)


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
    """Pack a weight [N, K] (float32 or bfloat16) and a bias [N];
    the result shares no memory with them."""
    require(
        weight.dim() == 2 and weight.shape[1] > 0, "pack_linear: expected weight [N, K]", weight
    )
    require(
        bias is None or bias.shape == weight.shape[:1],
        "pack_linear: expected bias [N]",
        weight,
        bias,
    )
    is_f32 = float_code(weight, "weight") == 0
    num_outputs, num_inputs = weight.shape
    packed = _allocate(
        PackedLayout("f32" if is_f32 else "bf16", num_outputs, num_inputs, num_inputs), bias
    )
    source = weight.contiguous()
    _native.pack(packed.native, address(source, "weight"))
    return packed


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None = None) -> CpuLinear:
    """Pack integers with their scales; the result shares no memory with them.

    Raises ValueError where the tensors do not fit together, and ConfigError where a group is too
    large for exact sums.
    """
    values, size = weight.values, weight.group_size
    require(
        values.dim() == 2 and values.dtype == torch.int8,
        "pack_quantized: expected int8 values [N, K]",
        values,
    )
    require(
        size > 0 and values.shape[1] % size == 0,
        f"pack_quantized: groups of {size} do not divide K",
        values,
    )
    num_outputs, num_inputs = values.shape
    for tensor in (weight.scales, weight.offsets):
        fits = tensor is None or (
            tensor.dtype == torch.float32 and tensor.shape == (num_outputs, num_inputs // size)
        )
        require(
            fits,
            f"pack_quantized: expected float32 scales and offsets [N, K / {size}]",
            values,
            tensor,
        )
    require(
        bias is None or bias.shape == values.shape[:1],
        "pack_quantized: expected bias [N]",
        values,
        bias,
    )
    is_int8_sum = weight.activations == "int8"
    if is_int8_sum and size > _native.MAX_INT8_GROUP:
        raise ConfigError(
            f"groups of {size} inputs are too large for exact sums of int8 products (at most "
            f"{_native.MAX_INT8_GROUP}); "
            "quantize the weight in smaller groups, or leave the activations in floating point"
        )
    check_kind(weight)
    _check_range(weight)
    layout = PackedLayout(
        "mxfp4" if weight.is_mxfp4 else "int8" if weight.bits == 8 else "int4",
        num_outputs,
        num_inputs,
        size,
        weight.offsets is not None,
        is_int8_sum,
    )
    packed = _allocate(layout, bias)
    held = [
        None if each is None else each.contiguous()
        for each in (values, weight.scales, weight.offsets)
    ]
    _native.pack_quantized(
        packed.native, *(0 if each is None else address(each, "quantized weight") for each in held)
    )
    return packed


def _check_range(weight: QuantizedWeight) -> None:
    """ValueError where a value does not fit the weight's bits."""
    if weight.values.numel() == 0 or weight.is_mxfp4:  # which the extension checks
        return
    least, most = (int(each) for each in weight.values.aminmax())
    low, high = (-8, 7) if weight.bits == 4 else (-128, 127)
    if least < low or most > high:
        raise ValueError(
            f"pack_quantized: values from {least} to {most}; {weight.bits} bits hold {low} "
            f"to {high}"
        )


def linear(x: Tensor, weight: PackedLinear, *, out_dtype: str | None = None) -> Tensor:
    """`x [T, K] @ weight.T + bias -> [T, N]`; x may be float32 or
    bfloat16 whatever the weight is."""
    packed = _checked(x, weight)
    num_rows = x.shape[0]
    out = torch.empty(
        (num_rows, packed.num_outputs),
        dtype=x.dtype if out_dtype is None else getattr(torch, out_dtype),
    )
    code = float_code(out, "out_dtype")
    _native.linear(
        packed.native, address(x, "x"), float_code(x, "x"), num_rows, out.data_ptr(), code
    )
    return out


def gated_linear(x: Tensor, weight: PackedLinear, activation: Gating) -> Tensor:
    """`activation(gate) * up -> [T, F]` of a weight [2 * F, K];
    the sums are never rounded in between."""
    packed = _checked(x, weight)
    if packed.num_outputs % 2:
        raise ValueError(
            f"gated_linear: the weight has {packed.num_outputs} outputs; expected as many "
            "for gate as for up"
        )
    num_rows, dtype = x.shape[0], float_code(x, "x")
    out = torch.empty((num_rows, packed.num_outputs // 2), dtype=x.dtype)
    code = gating_code(activation)
    _native.linear_gated(
        packed.native, code, address(x, "x"), dtype, num_rows, out.data_ptr(), dtype
    )
    return out


def linear_argmax(x: Tensor, weight: PackedLinear) -> tuple[Tensor, Tensor]:
    """Return each row's largest output, which is all that is stored of them."""
    packed = _checked(x, weight)
    num_rows = x.shape[0]
    ids, values = (
        torch.empty(num_rows, dtype=torch.int64),
        torch.empty(num_rows, dtype=torch.float32),
    )
    _native.linear_peaks(
        packed.native,
        address(x, "x"),
        float_code(x, "x"),
        num_rows,
        ids.data_ptr(),
        values.data_ptr(),
    )
    return ids, values


def linear_draws(x: Tensor, weight: PackedLinear, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_argmax`, and tokens drawn slice by slice as well."""
    packed = _checked(x, weight)
    num_rows, num_draws = x.shape[0], draws.row.numel()
    ids, values = (
        torch.empty(num_rows, dtype=torch.int64),
        torch.empty(num_rows, dtype=torch.float32),
    )
    drawn = torch.empty(num_draws, dtype=torch.int64)
    _native.linear_draws(
        packed.native,
        address(x, "x"),
        float_code(x, "x"),
        num_rows,
        ids.data_ptr(),
        values.data_ptr(),
        num_draws,
        indices_address(draws.row, "row", num_draws),
        vector_address(draws.scale, "scale", torch.float32, num_draws),
        indices_address(draws.keys.seed, "seed", num_draws),
        indices_address(draws.keys.position, "position", num_draws),
        drawn.data_ptr(),
    )
    return ids, values, drawn


def _checked(x: Tensor, weight: PackedLinear) -> CpuLinear:
    """Return the weight, where it is ours and x fits it."""
    if not isinstance(weight, CpuLinear):
        raise TypeError(
            f"linear: the weight was packed by another back end ({type(weight).__name__})"
        )
    if x.dim() != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"linear: x is {list(x.shape)}; expected [T, {weight.num_inputs}]")
    return weight
