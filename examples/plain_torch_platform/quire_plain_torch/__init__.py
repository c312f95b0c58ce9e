"""A platform for Quire whose device is torch itself: what a package for other hardware looks like.

Start from `ReferenceKernels`, which has every operation, and replace those that the device computes
otherwise; `quire plugin check plain-torch` says which rules they break. The one that surprises: a
row's bits must not depend on the rows beside it, so no product here is of several rows at once
unless each row's sum is its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.interface import PackedLinear
from quire.kernels.reference import ReferenceKernels
from quire.kernels.reference.linear import ReferenceLinear
from quire.program.operations import Gating

NAME = "plain-torch"
_STEP = 16
"""Inputs that are added up at once."""


class PlainTorchPlatform:
    """Implements `quire.kernels.platforms.Platform`."""

    protocol_version = 1

    def reasons_against(self) -> list[str]:
        """Say why it cannot compute here. A real one looks for its device and its driver."""
        return []

    def kernels(self) -> PlainTorchKernels:
        """Return the kernels."""
        return PlainTorchKernels()


class PlainTorchKernels(ReferenceKernels):
    """Implements `quire.kernels.interface.Kernels`, with products and norms of its own."""

    name = NAME

    def linear(self, x: Tensor, weight: PackedLinear, *, out_dtype: str | None = None) -> Tensor:
        """See `Kernels.linear`: sums over 16 inputs at a time, in ascending order, of all rows
        together. Elementwise operations and sums over the last dimension of one fixed size treat
        each row alike."""
        if not isinstance(weight, ReferenceLinear):
            return super().linear(x, weight, out_dtype=out_dtype)
        wide, matrix = x.float(), weight.weight.float()
        total = torch.zeros(len(x), weight.num_outputs)
        for first in range(0, weight.num_inputs, _STEP):
            part = wide[:, None, first : first + _STEP] * matrix[None, :, first : first + _STEP]
            for column in part.unbind(-1):  # one addition after the other
                total = total + column
        if weight.bias is not None:
            total = total + weight.bias.float()
        return total.to(x.dtype if out_dtype is None else getattr(torch, out_dtype))

    def linear_argmax(self, x: Tensor, weight: PackedLinear) -> tuple[Tensor, Tensor]:
        """See `Kernels.linear_argmax`: of this back end's own products."""
        logits = self.linear(x, weight, out_dtype="float32")
        largest = logits.max(dim=-1).values
        ids = (logits == largest[:, None]).int().argmax(dim=-1)  # the lowest of equal ones
        return ids, largest

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: Gating) -> Tensor:
        """See `Kernels.gated_linear`."""
        products = self.linear(x, weight, out_dtype="float32")
        return self.gated(products, activation).to(x.dtype)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
    ) -> Tensor:
        """See `Kernels.rms_norm`: squares are added in float64."""
        wide = x.double()
        scale = torch.rsqrt(torch.stack([row.square().mean() for row in wide]) + eps)
        return (wide * scale[:, None] * (weight.double() + weight_offset)).to(x.dtype)
