"""Weights that a program gives as tensors, by the names that a checkpoint has for them."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import CheckpointError
from quire.models.declaration import DecoderSpec
from quire.weights.checkpoint import SafetensorsCheckpoint
from quire.weights.tensor_file import StoredTensor, TensorFile

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
_ALIGNMENT = 64


class GivenTensors(SafetensorsCheckpoint):
    """A checkpoint in memory: checked and read as one in a folder is. Copies nothing that is in
    the host's memory in one piece; the tensors must stay as they are until it is closed."""

    def __init__(self, tensors: Mapping[str, Tensor], spec: DecoderSpec) -> None:
        """Raises CheckpointError for names, shapes and dtypes that are not the model's."""
        self._given = _MemoryFile(tensors)
        super().__init__(Path("the given weights"), spec)

    def _find_tensors(self) -> dict[str, tuple[TensorFile, StoredTensor]]:
        self._files["given"] = self._given
        return {name: (self._given, stored) for name, stored in self._given.tensors.items()}


class _MemoryFile(TensorFile):
    """Tensors as if they were in a file, one behind the other."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.path, self.descriptor = Path("the given weights"), -1
        self.tensors, self.metadata = {}, {}
        self._starts: list[tuple[int, Tensor]] = []
        end = 0
        for name, given in tensors.items():
            dtype = _FORMAT_DTYPES.get(str(getattr(given, "dtype", None)).removeprefix("torch."))
            if dtype is None:
                raise CheckpointError(
                    f"the given weights: {name!r} is a {type(given).__name__} of "
                    f"{getattr(given, 'dtype', 'no dtype')}; give tensors of float32, bfloat16 or "
                    "float16"
                )
            tensor = given.detach().cpu().contiguous()
            self.tensors[name] = StoredTensor(dtype, tuple(tensor.shape), end, tensor.nbytes)
            self._starts.append((end, tensor))
            end += -(-max(tensor.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT

    def read_into(self, buffer: memoryview, start: int) -> None:
        """See `TensorFile.read_into`; within one tensor."""
        place = bisect_right(self._starts, start, key=lambda each: each[0]) - 1
        first, tensor = self._starts[place]
        offset = start - first
        assert offset + buffer.nbytes <= tensor.nbytes, "a read beyond a tensor's end"
        target = (ctypes.c_char * buffer.nbytes).from_buffer(buffer)
        ctypes.memmove(target, tensor.data_ptr() + offset, buffer.nbytes)

    def has_changed(self) -> bool:
        """False: there is no file."""
        return False
