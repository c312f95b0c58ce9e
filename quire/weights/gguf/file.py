"""The GGUF container (versions 2 and 3, little endian), read from the format's public description.

Owns bounds: every length, count, offset and product is checked with unbounded integers against the
file's size before anything is allocated, and metadata may take `_MAX_HEADER_BYTES`. Imports no
torch and executes nothing. Tensor data is never read here; a `GgufTensor` says where it lies.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from quire.common.file_states import FileState
from quire.common.small_files import open_regular
from quire.errors import CheckpointError

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


class Encoding(NamedTuple):
    """How numbers of a tensor are stored: `block_bytes` for every `block_len` of them."""

    name: str
    block_len: int
    block_bytes: int


ENCODINGS: Final[Mapping[int, Encoding]] = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    30: Encoding("BF16", 1, 2),
    39: Encoding("MXFP4", 32, 17),
}
"""What Quire reads, by the number in the file."""

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_HEADER_BYTES: Final = 256 << 20  # a vocabulary of 256,000 tokens with merges takes 15 MB
_BUFFER_BYTES: Final = 64 << 10
_MAX_KEY_LEN: Final = 65535
_MAX_ENTRIES: Final = 1 << 16
_MAX_ARRAY_LEN: Final = 1 << 22
_MAX_DIMS: Final = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
# Type numbers to codes that `struct` and `array` share; 6 and 12 are floats.
_NUMBERS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """The last dimension is contiguous (GGUF itself lists it first)."""
    encoding: Encoding
    offset: int
    """In bytes from the file's beginning."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.encoding.block_len * self.encoding.block_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The checked header of a file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    state: FileState
    """As it was when the header was read."""


def read_gguf(path: Path) -> GgufFile:
    """Read and check a file's header. Raises CheckpointError."""
    try:
        with open_regular(path, _BUFFER_BYTES) as file:
            return _Header(path, file).read()
    except (OSError, ValueError) as error:  # a name with a null byte: ValueError
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Header:
    """A cursor over the header; every method checks before it reads."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        # not mapped: touching a page of a file that is cut short meanwhile would kill the process
        self._file = file
        self._state = FileState.of(os.fstat(file.fileno()))
        self._size = self._state.size
        self._limit = min(self._size, _MAX_HEADER_BYTES)
        self._at = 0
        self._readers: dict[int, Callable[[], Value]] = {
            _STRING: self._string,
            _ARRAY: self._array,
            _BOOL: self._bool,
        }

    def read(self) -> GgufFile:
        if self._take(4) != _MAGIC:
            raise self._error("is no GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._error(f"has version {version}; supported: 2 and 3, little endian")
        num_tensors, num_values = self._count("tensors"), self._count("metadata values")
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._string(_MAX_KEY_LEN)
            if key in metadata:
                raise self._error(f"has the metadata key {key!r} twice")
            metadata[key] = self._value(int(self._number("I")))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        start = self._data_start(metadata)
        tensors: dict[str, GgufTensor] = {}
        for tensor in infos:
            if tensor.name in tensors:
                raise self._error(f"has the tensor {tensor.name!r} twice")
            tensors[tensor.name] = self._placed(tensor, start)
        self._refuse_overlaps(tensors)
        return GgufFile(self._path, metadata, tensors, self._state)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {what}")

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._limit - self._at:
            where = (
                "is truncated"
                if self._limit == self._size
                else f"has a header of more than {_MAX_HEADER_BYTES} bytes"
            )
            raise self._error(f"{where}: {num_bytes} bytes are wanted at {self._at}")
        self._at += num_bytes
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self._error("is truncated while it is being read")
        return data

    def _number(self, code: str) -> int | float:
        number: int | float = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]
        return number

    def _count(self, what: str) -> int:
        count = int(self._number("Q"))
        if count > _MAX_ENTRIES:
            raise self._error(f"announces {count} {what}; at most {_MAX_ENTRIES} are allowed")
        return count

    def _string(self, max_len: int = _MAX_HEADER_BYTES) -> str:
        length = int(self._number("Q"))
        if length > max_len:
            raise self._error(f"has a string of {length} bytes where at most {max_len} are allowed")
        return self._take(length).decode("utf-8", "replace")

    def _bool(self) -> bool:
        return self._number("B") != 0

    def _value(self, kind: int) -> Value:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind not in self._readers:
            raise self._error(f"has a metadata value of the unknown type {kind}")
        return self._readers[kind]()

    def _array(self) -> Value:
        kind, length = int(self._number("I")), int(self._number("Q"))
        if length > _MAX_ARRAY_LEN:
            raise self._error(
                f"has an array of {length} values; at most {_MAX_ARRAY_LEN} are allowed"
            )
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        code = "B" if kind == _BOOL else _NUMBERS.get(kind)
        if code is None:
            raise self._error(f"has an array of values of the type {kind}")
        numbers = array(code)
        numbers.frombytes(self._take(struct.calcsize(f"<{code}") * length))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _tensor_info(self) -> GgufTensor:
        """Return a tensor whose offset counts from the data's beginning, as the file says it."""
        name = self._string(_MAX_KEY_LEN)
        num_dims = int(self._number("I"))
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"has the tensor {name!r} of {num_dims} dimensions")
        shape = tuple(int(self._number("Q")) for _ in range(num_dims))[::-1]
        number, offset = int(self._number("I")), int(self._number("Q"))
        if number not in ENCODINGS:
            known = ", ".join(each.name for each in ENCODINGS.values())
            raise self._error(
                f"has the tensor {name!r} in the encoding {number}; supported: {known}"
            )
        return GgufTensor(name, shape, ENCODINGS[number], offset)

    def _data_start(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._error(f"has general.alignment={alignment!r}; expected a multiple of 8")
        return -(-self._at // alignment) * alignment

    def _placed(self, tensor: GgufTensor, start: int) -> GgufTensor:
        placed = GgufTensor(tensor.name, tensor.shape, tensor.encoding, start + tensor.offset)
        if min(tensor.shape) < 1 or tensor.shape[-1] % tensor.encoding.block_len:
            raise self._error(
                f"has the tensor {tensor.name!r} {list(tensor.shape)}, which "
                f"{tensor.encoding.name} cannot hold"
            )
        if placed.offset + placed.num_bytes > self._size:
            raise self._error(
                f"is truncated: the tensor {tensor.name!r} takes {placed.num_bytes} bytes at "
                f"{placed.offset}, and the file has "
                f"{self._size}"
            )
        return placed

    def _refuse_overlaps(self, tensors: Mapping[str, GgufTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._error(
                    f"has the tensors {before!r} and {tensor.name!r} in the same place"
                )
            end, before = tensor.offset + tensor.num_bytes, tensor.name
