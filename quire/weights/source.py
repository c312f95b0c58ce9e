"""The seam between a model that is being built and wherever its weights come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from quire.models.tensors import LinearSpec, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.interface import PackedLinear


class WeightSource(Protocol):
    """Gives one tensor at a time, so that no second copy of a model ever exists."""

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """Write `tensor`'s values into `out`, which has its logical shape and the dtype that is
        wanted, on any device.

        Raises CheckpointError where the values cannot be read.
        """
        ...

    def packed(self, parts: Sequence[LinearSpec]) -> PackedLinear | None:
        """Return the projection that stacks `parts` by outputs, where it is packed already; else
        None, and `fill` gives its parts.

        Raises CheckpointError where the values could not be read.
        """
        return None

    def table(self, tensor: TensorSpec) -> Tensor | None:
        """Return a tensor [rows, width] in the dtype that is computed in, where it is in memory
        already; else None.

        Raises CheckpointError where the values could not be read.
        """
        return None
