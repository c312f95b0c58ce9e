"""One safetensors file: its header, checked to the last byte, and its bytes by position.

Owns an open file and the rules of the format. Everything that a header says is checked before it is
believed: sizes, bounds, holes, overlaps, repeated names. Imports no torch and maps nothing into
memory: reading through a descriptor gives an error where the file is cut short meanwhile, where
touching a mapped page would kill the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000
"""As the format demands."""
_MAX_VALUES = 8 << 20
"""Of a header: names, numbers and lists. A tensor takes some ten;
the largest published checkpoint has 100,000 of them."""
_MAX_DIMS = 64
_MAX_BYTES = 1 << 62
_MAX_REASON_CHARS = 300
_MAX_NAME_CHARS = 150
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    """As the format names it: "F32", "BF16", ..."""
    shape: tuple[int, ...]
    start: int
    """Byte of the file that it begins with."""
    num_bytes: int


class TensorFile:
    """An open file. Close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open and check; raises CheckpointError for anything that is not a
        safetensors file to the letter."""
        self.path = path
        self.descriptor = -1
        try:
            # a pipe is not waited for
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._identity = self._look()
            self.tensors, self.metadata = _read_header(self.descriptor, self._identity[0])
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            reason = str(error)[:_MAX_REASON_CHARS]
            raise CheckpointError(f"{path} is not a readable safetensors file: {reason}") from None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` (bytes) from byte `start` on. Raises OSError."""
        while buffer.nbytes:
            count = os.preadv(self.descriptor, [buffer], start)
            if count == 0:
                raise OSError("the file is shorter than its header says")
            buffer, start = buffer[count:], start + count

    def has_changed(self) -> bool:
        """Test whether the file was written to since it was opened.
        A file that replaced it does not matter."""
        return self._look() != self._identity

    def _look(self) -> tuple[int, int]:
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns


def _read_header(
    descriptor: int, size: int
) -> tuple[Mapping[str, StoredTensor], Mapping[str, str]]:
    """Return the tensors by name, and what else is said;
    ValueError where the header breaks a rule of the format."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    data = os.pread(descriptor, length, 8)
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _MAX_VALUES:
        raise ValueError(f"a header of more than {_MAX_VALUES} values")
    header = json.loads(data.decode(), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError("its metadata are no texts by name")
    tensors = {name: _tensor(name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)
    ):
        if tensor.start != end:
            raise ValueError(f"tensor {name} begins at byte {tensor.start}, expected {end}")
        end += tensor.num_bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")
    return tensors, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name is given twice")
    return entries


def _tensor(name: str, entry: object, first_byte: int) -> StoredTensor:
    match entry:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [int(begin), int(end)],
        } if dtype in _DTYPE_BITS:
            if _is_shape(shape) and 0 <= begin <= end <= _MAX_BYTES:
                if math.prod(shape) * _DTYPE_BITS[dtype] != 8 * (end - begin):
                    raise ValueError(
                        f"tensor {name[: _MAX_REASON_CHARS // 2]}: {dtype} {shape} does not "
                        f"take {end - begin} bytes"
                    )
                return StoredTensor(dtype, tuple(shape), first_byte + begin, end - begin)
    raise ValueError(
        f"tensor {name[: _MAX_REASON_CHARS // 2]} is not described as the format demands"
    )


def _is_shape(extents: list[Any]) -> bool:
    """Few enough and small enough numbers to be multiplied."""
    return len(extents) <= _MAX_DIMS and all(
        type(extent) is int and 0 <= extent <= _MAX_BYTES for extent in extents
    )
