"""The seam between a model that is being built and wherever its weights come from."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.models.declaration import TensorSpec


class WeightSource(Protocol):
    """Gives one tensor at a time, so that no second copy of a model ever exists."""

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """Write `tensor`'s values into `out`, which has its logical shape and the dtype that is wanted.

        Raises CheckpointError where the values cannot be read.
        """
        ...
