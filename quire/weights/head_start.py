"""Weights that are read and packed in the background while the interpreter is still importing
torch.

Importing torch takes a second and a half of one core, mostly Python; reading and packing a small
model takes less of another. Owns the memory that they end up in: one region, each projection and
table aligned to cache lines. Only what the native kernels take as it is comes this way; everything
else is read by the checkpoint itself, later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.common.numbers import align_up
from quire.common.openmp import torch_library
from quire.common.pages import reserve
from quire.errors import CheckpointError
from quire.kernels.cpu import _native
from quire.models.tensors import LinearSpec, TensorSpec
from quire.weights.checkpoint import SafetensorsCheckpoint, StoredRows

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.interface import PackedLinear

_ALIGNMENT = 64
_STORED_CODES = {"F32": 0, "BF16": 1, "F16": 2}
_DTYPE_CODES = {"float32": 0, "bfloat16": 1}

Parts = tuple[LinearSpec, ...]


class Wanted(NamedTuple):
    """What a model needs of a checkpoint, as far as it can be brought into memory early."""

    projections: Sequence[Parts]
    tables: Sequence[TensorSpec] = ()
    """Matrices that stay as they are, such as embeddings."""


class _Extent(NamedTuple):
    """Where something lies in the region."""

    offset: int
    num_bytes: int


class HeadStart:
    """A `WeightSource` over a checkpoint of which most is on its way already.
    Use as a context manager."""

    def __init__(
        self, checkpoint: SafetensorsCheckpoint, wanted: Wanted, dtype: str, num_threads: int
    ) -> None:
        """Begin to read and pack what can be of `wanted`; `num_threads` is how many help once
        a reader waits.

        The checkpoint closes with this.
        """
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._num_threads = num_threads
        self._is_finished = False
        self.is_closed = False
        self._places: dict[Parts | TensorSpec, _Extent] = {}
        self._num_reserved = 0
        found = self._reserve(wanted)
        self._region = reserve(self._num_reserved)
        self._loading: _native.Loading | None = self._begin(found)

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is still under way and close the files; what was handed out stays.
        Idempotent."""
        self.is_closed = True
        if self._loading is not None:
            self._loading.cancel()
            self._loading = None  # a plan that outlives this would hold it to the interpreter's end
        self._checkpoint.close()

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """See `WeightSource.fill`."""
        self._checkpoint.fill(out, tensor)

    def packed(self, parts: Sequence[LinearSpec]) -> PackedLinear | None:
        """See `WeightSource.packed`; the first call waits, and helps,
        until everything is in place."""
        data = self._bytes(tuple(parts))
        if data is None:
            return None
        from quire.kernels.cpu.linear import CpuLinear, PackedLayout

        num_inputs = parts[0].num_inputs
        layout = PackedLayout(
            "f32" if self._dtype == "float32" else "bf16",
            _num_outputs(parts),
            num_inputs,
            num_inputs,
        )
        return CpuLinear(layout, data, self._bias(parts))

    def table(self, tensor: TensorSpec) -> Tensor | None:
        """See `WeightSource.table`; the first call waits as that of `packed` does."""
        import torch

        data = self._bytes(tensor)
        return None if data is None else data.view(getattr(torch, self._dtype)).view(tensor.shape)

    def _bytes(self, what: Parts | TensorSpec) -> Tensor | None:
        place = self._places.get(what)
        if place is None:
            return None
        self._finish()
        import torch

        return torch.frombuffer(
            self._region, dtype=torch.uint8, count=place.num_bytes, offset=place.offset
        )

    def _finish(self) -> None:
        if not self._is_finished:
            assert self._loading is not None, "it is closed"
            try:
                self._loading.finish(self._num_threads)
            except RuntimeError as error:
                raise CheckpointError(f"the weights cannot be read: {error}") from error
            self._checkpoint.check_unchanged()
            self._is_finished = True

    def _bias(self, parts: Sequence[LinearSpec]) -> Tensor | None:
        """Return the parts' biases in one tensor, rounded to the compute dtype;
        zero where a part has none."""
        import torch

        if all(part.bias is None for part in parts):
            return None
        bias = torch.zeros(_num_outputs(parts), dtype=getattr(torch, self._dtype))
        for part, rows in zip(
            parts, torch.split(bias, [part.num_outputs for part in parts]), strict=True
        ):
            if part.bias is not None:
                self._checkpoint.fill(rows, part.bias)
        return bias.float()

    def _reserve(self, wanted: Wanted) -> dict[Parts | TensorSpec, list[StoredRows]]:
        """Give a place to whatever can be read as it is stored; where its rows lie."""
        found: dict[Parts | TensorSpec, list[StoredRows]] = {}
        code = _DTYPE_CODES[self._dtype]
        for table in wanted.tables:
            rows = self._locate([table])
            if rows is not None and table.shape[1] % 2 == 0:
                found[table] = rows
                self._take(table, table.num_elements * (4 if self._dtype == "float32" else 2))
        for parts in wanted.projections:
            rows = self._locate([part.weight for part in parts])
            if rows is not None and not any(part.is_folded for part in parts):
                found[parts] = rows
                self._take(
                    parts, _native.Loading.num_bytes(code, _num_outputs(parts), parts[0].num_inputs)
                )
        return found

    def _locate(self, tensors: Sequence[TensorSpec]) -> list[StoredRows] | None:
        """Return where the rows of each lie; None if one is not stored in a way
        that can be read as it is."""
        located = [
            rows
            for tensor in tensors
            if (rows := self._checkpoint.locate(tensor)) and rows.dtype in _STORED_CODES
        ]
        return located if len(located) == len(tensors) else None

    def _take(self, what: Parts | TensorSpec, num_bytes: int) -> None:
        self._places[what] = _Extent(self._num_reserved, num_bytes)
        self._num_reserved = align_up(self._num_reserved + num_bytes, _ALIGNMENT)

    def _begin(self, found: dict[Parts | TensorSpec, list[StoredRows]]) -> _native.Loading:
        loading = _native.Loading((self._region, self._checkpoint))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        code = _DTYPE_CODES[self._dtype]
        for what, located in found.items():
            is_table = isinstance(what, TensorSpec)
            tensors = [what] if isinstance(what, TensorSpec) else [part.weight for part in what]
            num_rows = sum(tensor.shape[0] for tensor in tensors)
            loading.add(
                address + self._places[what].offset, code, is_table, num_rows, tensors[0].shape[1]
            )
            for tensor, rows in zip(tensors, located, strict=True):
                loading.add_part(
                    rows.file.descriptor, rows.start, tensor.shape[0], _STORED_CODES[rows.dtype]
                )
        loading.start(str(torch_library("libtorch_cpu.so") or ""))
        return loading


def _num_outputs(parts: Sequence[LinearSpec]) -> int:
    return sum(part.num_outputs for part in parts)
