"""Weights that are read and packed in the background while the interpreter is still importing torch.

Importing torch takes a second and a half of one core, mostly Python; reading and packing a small model takes less of
another. Owns the memory that the packed projections end up in: one region, each projection aligned to cache lines. Only
what the native kernels take as it is comes this way; everything else is read by the checkpoint itself, later.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from quire.common.numbers import align_up
from quire.common.openmp import torch_library
from quire.errors import CheckpointError
from quire.kernels.cpu import _native
from quire.models.declaration import LinearSpec, TensorSpec
from quire.weights.checkpoint import SafetensorsCheckpoint, StoredRows

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.interface import PackedLinear

_ALIGNMENT = 64
_STORED_CODES = {"F32": 0, "BF16": 1, "F16": 2}
_DTYPE_CODES = {"float32": 0, "bfloat16": 1}

Parts = tuple[LinearSpec, ...]


class _Place(NamedTuple):
    """Where a packed projection lies in the region."""

    offset: int
    num_bytes: int


class HeadStart:
    """A `WeightSource` over a checkpoint of which most is on its way already. Use as a context manager."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, projections: Sequence[Parts], dtype: str, num_threads: int) -> None:
        """Begin to read and pack what can be of `projections`; `num_threads` is how many help once somebody waits.

        The checkpoint closes with this.
        """
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._num_threads = num_threads
        self._is_finished = False
        self.is_closed = False
        self._places: dict[Parts, _Place] = {}
        located = {parts: rows for parts in projections if (rows := self._locate(parts)) is not None}
        for parts in located:
            self._reserve(parts)
        size = sum(align_up(place.num_bytes, _ALIGNMENT) for place in self._places.values())
        self._region = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a page fault for every 4 KiB would cost as much as the packing
            self._region.madvise(mmap.MADV_HUGEPAGE)
        self._loading = self._begin(located)

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is still under way and close the files; what was handed out stays. Idempotent."""
        self.is_closed = True
        self._loading.cancel()
        self._checkpoint.close()

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """See `WeightSource.fill`."""
        self._checkpoint.fill(out, tensor)

    def packed(self, parts: Sequence[LinearSpec]) -> PackedLinear | None:
        """See `WeightSource.packed`; the first call waits, and helps, until everything is in place."""
        place = self._places.get(tuple(parts))
        if place is None:
            return None
        self._finish()
        import torch

        from quire.kernels.cpu.linear import CpuLinear, PackedLayout

        data = torch.frombuffer(self._region, dtype=torch.uint8, count=place.num_bytes, offset=place.offset)
        num_inputs = parts[0].num_inputs
        layout = PackedLayout("f32" if self._dtype == "float32" else "bf16", _num_outputs(parts), num_inputs, num_inputs)
        return CpuLinear(layout, data, self._bias(parts))

    def _finish(self) -> None:
        if not self._is_finished:
            try:
                self._loading.finish(self._num_threads)
            except RuntimeError as error:
                raise CheckpointError(f"the weights cannot be read: {error}") from error
            self._checkpoint.check_unchanged()
            self._is_finished = True

    def _bias(self, parts: Sequence[LinearSpec]) -> Tensor | None:
        """The parts' biases in one tensor, rounded to the compute dtype; zero where a part has none."""
        import torch

        if all(part.bias is None for part in parts):
            return None
        bias = torch.zeros(_num_outputs(parts), dtype=getattr(torch, self._dtype))
        for part, rows in zip(parts, torch.split(bias, [part.num_outputs for part in parts]), strict=True):
            if part.bias is not None:
                self._checkpoint.fill(rows, part.bias)
        return bias.float()

    def _locate(self, parts: Parts) -> list[StoredRows] | None:
        """Where each part's rows lie; None if one is not stored in a way that can be read as it is."""
        found = [self._checkpoint.locate(part.weight) for part in parts]
        return None if any(rows is None or rows.dtype not in _STORED_CODES for rows in found) else [r for r in found if r]

    def _reserve(self, parts: Parts) -> None:
        num_bytes = _native.Loading.num_bytes(_DTYPE_CODES[self._dtype], _num_outputs(parts), parts[0].num_inputs)
        end = max((place.offset + place.num_bytes for place in self._places.values()), default=0)
        self._places[parts] = _Place(align_up(end, _ALIGNMENT), num_bytes)

    def _begin(self, located: dict[Parts, list[StoredRows]]) -> _native.Loading:
        loading = _native.Loading((self._region, self._checkpoint))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        for parts, found in located.items():
            code = _DTYPE_CODES[self._dtype]
            loading.add(address + self._places[parts].offset, code, _num_outputs(parts), parts[0].num_inputs)
            for part, rows in zip(parts, found, strict=True):
                loading.add_part(rows.file.descriptor, rows.start, part.num_outputs, _STORED_CODES[rows.dtype])
        loading.start(str(torch_library("libtorch_cpu.so") or ""))
        return loading


def _num_outputs(parts: Sequence[LinearSpec]) -> int:
    return sum(part.num_outputs for part in parts)
