"""Reference projection: one matrix-vector product per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.interface import PackedLinear


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


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
    """Keep the tensors; raises ValueError unless weight is [N, K] and bias [N]."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"expected weight [N, K] and bias [N], got {shape(weight)} and {shape(bias)}")
    return ReferenceLinear(weight.contiguous(), bias, weight.shape[0], weight.shape[1])


def linear(x: Tensor, weight: PackedLinear, *, out_dtype: str | None = None) -> Tensor:
    """`x [T, K] -> [T, N]`: each row by `mv` in float32, rounded once."""
    if not isinstance(weight, ReferenceLinear):
        raise TypeError(f"linear: the weight was packed by another back end ({type(weight).__name__})")
    if x.dim() != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"linear: x is {shape(x)} but the weight has {weight.num_inputs} inputs")
    dtype = x.dtype if out_dtype is None else getattr(torch, out_dtype)
    matrix = weight.weight.float()
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=dtype, device=x.device)
    for index, row in enumerate(x.float()):
        product = torch.mv(matrix, row.clone())  # a fresh row: the same alignment, so the same code path, for every row
        out[index] = product if weight.bias is None else product + weight.bias.float()
    return out


def shape(tensor: Tensor | None) -> list[int] | None:
    """A shape for messages."""
    return None if tensor is None else list(tensor.shape)
