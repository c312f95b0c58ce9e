"""Deferred split-K reduction: the kernel that consumes a GEMM's result adds its chunks (see `gemm`)
on load, where rows are few.

Saves one launch for each projection that is followed by a norm or by the preparation of attention
in a decode step. Owns nothing but the partial sums of one GEMM, until they are consumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels.interface import Kernels, PackedLinear


@dataclass(frozen=True, slots=True)
class PartialSums:
    """The result of `linear`, [T, N] in `dtype`, as split-K chunks and bias."""

    partial: Tensor
    """float32 [chunks, T, N]"""
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Return the result's shape, [T, N]."""
        return self.partial.shape[1:]


class Source(NamedTuple):
    """Arguments of a kernel that loads a GEMM's result, reduced or not: see `gemm.finished`."""

    values: Tensor
    bias: Tensor
    """Always a tensor; a kernel without bias does not read it."""
    num_splits: int
    """0 where the result is reduced."""
    has_bias: bool


def source_of(x: Tensor | PartialSums) -> Source:
    """Return the kernel arguments for a result; a tensor's values are used as they are."""
    if isinstance(x, Tensor):
        return Source(x, x, 0, has_bias=False)
    bias = x.partial if x.bias is None else x.bias
    return Source(x.partial, bias, x.partial.shape[0], has_bias=x.bias is not None)


class FinishingKernels(Kernels, Protocol):
    """A back end that can defer the split-K reduction."""

    def unfinished_linear(self, x: Tensor, weight: PackedLinear) -> Tensor | PartialSums:
        """Run `linear` as far as one launch goes, for `add_rms_norm`, `cache.enter` or `finish`."""
        ...

    def finish(self, x: Tensor | PartialSums) -> Tensor:
        """Reduce the chunks to the result of `linear`."""
        ...

    def add_rms_norm(
        self,
        x: Tensor | PartialSums,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        weight_offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        ...
