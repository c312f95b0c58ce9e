"""The weights of a layer that lies in a folder of its own, as sentence-transformers keep it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.common.small_files import is_file
from quire.errors import CheckpointError
from quire.models.tensors import TensorSpec
from quire.weights.checkpoint import SINGLE_NAME, fill_rows
from quire.weights.source import WeightSource
from quire.weights.tensor_file import TensorFile

if TYPE_CHECKING:
    from torch import Tensor


class DenseFolder(WeightSource):
    """A `WeightSource` over the one file of a module's folder."""

    def __init__(self, folder: Path) -> None:
        if not is_file(folder / SINGLE_NAME):
            raise CheckpointError(
                f"{folder} has no {SINGLE_NAME}; pickled weights are never loaded: convert them"
            )
        self._file = TensorFile(folder / SINGLE_NAME)

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """See `WeightSource.fill`."""
        stored = self._file.tensors.get(tensor.name)
        if stored is None or stored.shape != tensor.stored_shape:
            found = "lacks it" if stored is None else f"has {list(stored.shape)}"
            raise CheckpointError(
                f"{self._file.path}: {tensor.name} {list(tensor.stored_shape)} is expected, and "
                f"the file {found}"
            )
        fill_rows(self._file, stored, out, tensor.first_row)
