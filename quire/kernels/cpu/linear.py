"""Projections on the CPU: weights packed once into panels of 16 outputs (layout in csrc/cpu/dispatch.hpp)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.cpu import _native
from quire.kernels.cpu.checks import address, float_code, require
from quire.kernels.interface import PackedLinear, QuantizedWeight


@dataclass(slots=True)
class CpuLinear:
    """A packed weight: `data` is opaque bytes, `bias` float32 [N] or None. Implements `PackedLinear`."""

    data: Tensor
    bias: Tensor | None
    dtype_code: int
    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of memory held."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
    """Pack a weight [N, K] (float32 or bfloat16) and a bias [N]; the result shares no memory with them."""
    require(weight.dim() == 2 and weight.shape[1] > 0, "pack_linear: expected weight [N, K]", weight)
    require(bias is None or bias.shape == weight.shape[:1], "pack_linear: expected bias [N]", weight, bias)
    code = float_code(weight, "weight")
    num_outputs, num_inputs = weight.shape
    source = weight.contiguous()
    data = torch.empty(_native.packed_bytes(code, num_outputs, num_inputs), dtype=torch.uint8)
    _native.pack(address(source, "weight"), code, num_outputs, num_inputs, data.data_ptr())
    own_bias = None if bias is None else bias.detach().to("cpu", torch.float32, copy=True).contiguous()
    return CpuLinear(data, own_bias, code, num_outputs, num_inputs)


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
    """Raises ConfigError: quantized weights have no native kernels yet."""
    raise ConfigError(f"the native kernels cannot serve {weight.bits}-bit weights; choose kernels='reference'")


def linear(x: Tensor, weight: PackedLinear, *, out_dtype: str | None = None) -> Tensor:
    """`x [T, K] @ weight.T + bias -> [T, N]`; x may be float32 or bfloat16 whatever the weight is."""
    if not isinstance(weight, CpuLinear):
        raise TypeError(f"linear: the weight was packed by another back end ({type(weight).__name__})")
    if x.dim() != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"linear: x is {list(x.shape)}; expected [T, {weight.num_inputs}]")
    num_rows = x.shape[0]
    out = torch.empty((num_rows, weight.num_outputs), dtype=x.dtype if out_dtype is None else getattr(torch, out_dtype))
    _native.linear(
        address(x, "x"),
        float_code(x, "x"),
        num_rows,
        weight.data.data_ptr(),
        weight.dtype_code,
        weight.num_outputs,
        weight.num_inputs,
        0 if weight.bias is None else weight.bias.data_ptr(),
        out.data_ptr(),
        float_code(out, "out_dtype"),
    )
    return out
