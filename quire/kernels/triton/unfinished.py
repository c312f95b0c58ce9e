"""Products of few rows whose stretches (see `gemm`) are still to be added: by the kernel that reads
them next, as it reads.

So a decode step has one launch less for each projection that a norm, or the way into attention,
follows. Owns nothing but the tensors of one product, until it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels.interface import Kernels, PackedLinear


@dataclass(frozen=True, slots=True)
class PartialSums:
    """What `linear` would give, [T, N] in `dtype`, as its stretches and its bias."""

    partial: Tensor
    """float32 [stretches, T, N]"""
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the product."""
        return self.partial.shape[1:]


class Source(NamedTuple):
    """Arguments of a kernel that reads a product, finished or not: see `gemm.finished`."""

    values: Tensor
    bias: Tensor
    """A tensor in any case: a kernel without bias does not look at it."""
    num_splits: int
    """0 of a finished one."""
    has_bias: bool


def source_of(x: Tensor | PartialSums) -> Source:
    """For a tensor, its values as they are."""
    if isinstance(x, Tensor):
        return Source(x, x, 0, has_bias=False)
    bias = x.partial if x.bias is None else x.bias
    return Source(x.partial, bias, x.partial.shape[0], has_bias=x.bias is not None)


class FinishingKernels(Kernels, Protocol):
    """A back end whose projections may be left unfinished."""

    def unfinished_linear(self, x: Tensor, weight: PackedLinear) -> Tensor | PartialSums:
        """`linear`, as far as it goes in one launch, for `add_rms_norm`,
        `cache.enter` or `finish`."""
        ...

    def finish(self, x: Tensor | PartialSums) -> Tensor:
        """What `linear` would have given."""
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
