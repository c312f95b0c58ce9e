"""Safetensors checkpoints, one file or sharded, read one tensor at a time.

A checkpoint is data: it is checked against the declaration (names, shapes, dtypes) before any
weight is read, and nothing in it is ever executed. Pickled formats (.bin, .pt, .pth) are refused.
Never holds weights: `fill` reads from the file straight into the caller's buffer. Imports torch
only once tensors are wanted.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.common.small_files import exists, is_file, read_object
from quire.errors import CheckpointError
from quire.models.declaration import DecoderSpec
from quire.models.tensors import StackedPlace, TensorSpec
from quire.weights.source import WeightSource
from quire.weights.tensor_file import StoredTensor, TensorFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 64 << 20
_FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
FLOAT_DTYPES = frozenset(_FLOAT_DTYPES)
_DTYPES = _FLOAT_DTYPES | {
    "U8": "uint8", "I8": "int8", "I32": "int32", "I64": "int64", "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip
_PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_PACKED = ("qweight", "weight_packed")
"""What GPTQ and AWQ, and compressed-tensors, store in place of a weight."""
# Tables that can be computed, and causal masks, which old checkpoints carry along.
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
_MAX_SHOWN = 8
_MAX_NAME_CHARS = 255
"""Of a file, as most systems have it, and of anything that an error names."""
_CHUNK_BYTES = 8 << 20
"""Read at a time where values must be converted or transposed on the way."""


class StoredRows(NamedTuple):
    """Where the rows of a tensor lie, one after another."""

    file: TensorFile
    start: int
    """Byte of the file that the first row begins with."""
    dtype: str
    """As the format names it."""


class ExpectedTensor(NamedTuple):
    """A tensor that a checkpoint keeps in place of a weight:
    one of several that make up a quantized projection."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """The shapes that are understood."""
    dtypes: frozenset[str] = FLOAT_DTYPES
    """As the files call them."""
    is_optional: bool = False
    place: StackedPlace | None = None
    """Where checkpoints keep it that do not have `name`."""


Layout = Mapping[str, tuple[ExpectedTensor, ...]]
"""Weight names to what is stored in their place."""


class SafetensorsCheckpoint(WeightSource):
    """A `WeightSource` over a model folder. Use as a context manager; the files close with it."""

    def __init__(self, folder: Path, spec: DecoderSpec, layout: Layout | None = None) -> None:
        """Read the headers of the folder's safetensors files and check them against `spec`; raises
        CheckpointError.

        `layout` says which weights are stored as something else, for `read`; `fill` gives the
        others.
        """
        self._folder = folder
        self._layout = layout or {}
        self._files: dict[str, TensorFile] = {}
        self._stored = {
            renamed_to(name, spec.renamed): each for name, each in self._find_tensors().items()
        }
        self._prefix = self._missing_prefix(spec)
        self._has_stacked = self._find_stacked(spec)
        self._check(spec)

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            file.close()

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """See `WeightSource.fill`; reads only the rows that `tensor` names."""
        name = self._name(tensor)
        file, stored = self._stored[name]
        try:
            if tensor.is_transposed:
                _read_columns(file, stored, out, tensor.first_row, tensor.row_step)
            elif tensor.row_step > 1:
                rows = read_stored(file, stored)[tensor.first_row :: tensor.row_step]
                out.copy_(rows[: len(out)])
            else:
                fill_rows(file, stored, out, tensor.first_row)
            self.check_unchanged(file)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder}: tensor {name} cannot be read: {error}"
            ) from error

    def holds(self, tensor: TensorSpec) -> bool:
        """Whether a tensor is there, which only an optional one need not be."""
        return self._name(tensor) in self._stored

    def require(self, tensor: TensorSpec) -> None:
        """Raise CheckpointError where a tensor that is not of the declaration is absent, or has
        another shape or kind."""
        name, shape = self._name(tensor), tensor.stored_shape
        if name not in self._stored:
            raise CheckpointError(f"{self._folder} lacks {name} {list(shape)}")
        if wrong := self._mismatch(name, ExpectedTensor(name, (shape,))):
            raise CheckpointError(f"{self._folder}: {wrong}")

    def locate(self, tensor: TensorSpec) -> StoredRows | None:
        """Return where `tensor`'s rows lie in a file, or None where they are not stored as rows."""
        file, stored = self._stored[self._name(tensor)]
        if tensor.is_transposed or tensor.row_step > 1 or len(stored.shape) != 2:
            return None
        row_bytes = stored.num_bytes // stored.shape[0]
        return StoredRows(file, stored.start + tensor.first_row * row_bytes, stored.dtype)

    def read(self, name: str) -> Tensor | None:
        """Return a whole tensor of the layout as it is stored, or None where it is absent,
        which only an optional one may be."""
        name = name.removeprefix(self._prefix)
        if name not in self._stored:
            return None
        file, stored = self._stored[name]
        try:
            values = read_stored(file, stored)
            self.check_unchanged(file)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder}: tensor {name} cannot be read: {error}"
            ) from error
        return values

    def check_unchanged(self, *files: TensorFile) -> None:
        """Raise CheckpointError if one of these files, or any if none is named,
        was written to since it was opened."""
        for file in files or self._files.values():
            if file.has_changed():
                raise CheckpointError(f"{file.path} has changed while it was being loaded")

    def _find_tensors(self) -> dict[str, tuple[TensorFile, StoredTensor]]:
        """Return every tensor by name, from the files that the index names or from the only
        file."""
        if exists(self._folder / INDEX_NAME):
            return self._read_shards(_read_index(self._folder / INDEX_NAME))
        candidates = (
            [SINGLE_NAME]
            if is_file(self._folder / SINGLE_NAME)
            else _names(self._folder, {".safetensors"})
        )
        if len(candidates) == 1:
            return self._read_header(candidates[0])
        if candidates:
            raise CheckpointError(
                f"{self._folder} has {len(candidates)} .safetensors files "
                f"({_listed(candidates)}) but no {INDEX_NAME}"
            )
        pickled = _names(self._folder, _PICKLED_SUFFIXES)
        if pickled:
            raise CheckpointError(
                f"{self._folder} has only pickled weights ({_listed(pickled)}), which can "
                "execute code and are never "
                f"loaded; convert them to safetensors (save_pretrained of transformers does so)"
            )
        raise CheckpointError(f"{self._folder} has no {SINGLE_NAME} and no {INDEX_NAME}")

    def _read_shards(self, index: dict[str, str]) -> dict[str, tuple[TensorFile, StoredTensor]]:
        held = {file: self._read_header(file) for file in sorted(set(index.values()))}
        absent = [
            f"{name} (said to be in {file})"
            for name, file in index.items()
            if name not in held[file]
        ]
        if absent:
            raise CheckpointError(
                f"{self._folder / INDEX_NAME} names tensors that the files lack: {_listed(absent)}"
            )
        return {name: held[file][name] for name, file in index.items()}

    def _read_header(self, file: str) -> dict[str, tuple[TensorFile, StoredTensor]]:
        path = self._folder / file
        if not is_file(path):
            raise CheckpointError(f"{path} is missing; {INDEX_NAME} names it")
        self._files[file] = opened = TensorFile(path)
        return {name: (opened, stored) for name, stored in opened.tensors.items()}

    def _missing_prefix(self, spec: DecoderSpec) -> str:
        """Return the prefix that a checkpoint of the bare decoder leaves out, or nothing."""
        prefix = spec.optional_prefix
        name = spec.embedding.name
        is_bare = (
            name not in self._stored
            and name.startswith(prefix)
            and name[len(prefix) :] in self._stored
        )
        return prefix if is_bare else ""

    def _find_stacked(self, spec: DecoderSpec) -> bool:
        """Give matrices that lie among others in one tensor their own names, and forget that.
        Return whether there are any."""
        opened = set()
        for tensor in self._expected(spec):
            place, name = tensor.place, tensor.name.removeprefix(self._prefix)
            if place is None or name in self._stored:
                continue
            other = place.name.removeprefix(self._prefix)
            if other not in self._stored:
                continue
            file, stored = self._stored[other]
            if stored.shape != place.shape:
                raise CheckpointError(
                    f"{self._folder}: {other} is {list(stored.shape)}, config.json implies "
                    f"{list(place.shape)}"
                )
            element, shape = stored.num_bytes // math.prod(stored.shape), tensor.shapes[0]
            start = stored.start + place.first_row * stored.shape[-1] * element
            held = StoredTensor(stored.dtype, shape, start, math.prod(shape) * element)
            self._stored[name] = file, held
            opened.add(other)
        for name in opened:
            del self._stored[name]
        return bool(opened)

    def _name(self, tensor: TensorSpec) -> str:
        return tensor.name.removeprefix(self._prefix)

    def _check(self, spec: DecoderSpec) -> None:
        """Check that every tensor of the declaration is there with its shape and a float dtype, and
        no other."""
        expected = {
            tensor.name.removeprefix(self._prefix): tensor for tensor in self._expected(spec)
        }
        required = [
            tensor
            for name, tensor in expected.items()
            if name not in self._stored and not tensor.is_optional
        ]
        missing = list(dict.fromkeys(map(self._wanted, required)))
        if missing:
            raise CheckpointError(
                f"{self._folder} lacks {len(missing)} tensors: {_listed(missing)}"
                f"{self._hint([tensor.name for tensor in required])}"
            )
        present = {name: tensor for name, tensor in expected.items() if name in self._stored}
        wrong = [line for name, tensor in present.items() if (line := self._mismatch(name, tensor))]
        if wrong:
            raise CheckpointError(
                f"{self._folder} has {len(wrong)} tensors that do not fit: {_listed(wrong)}"
            )
        tied = {"lm_head.weight"} if spec.is_tied or spec.head is None else set()
        extra = [
            n
            for n in self._stored
            if n not in expected
            and n not in tied
            and not n.startswith(spec.unused)
            and not _HARMLESS.fullmatch(n)
        ]
        if extra:
            raise CheckpointError(
                f"{self._folder} has {len(extra)} tensors that {spec.architecture} does not "
                f"use: {_listed(extra)}"
            )

    def _wanted(self, tensor: ExpectedTensor) -> str:
        """Return the name that a tensor would have in these files, and its shape there."""
        name, shape = tensor.name, tensor.shapes[0]
        if self._has_stacked and tensor.place is not None:
            name, shape = tensor.place.name, tensor.place.shape
        return f"{name.removeprefix(self._prefix)} {list(shape)}"

    def _hint(self, missing: Sequence[str]) -> str:
        """Say so where weights are there in a form that the declaration has none for."""
        modules = [name.removesuffix("weight") for name in missing if name.endswith(".weight")]
        packed = [name for name in modules for suffix in _PACKED if name + suffix in self._stored]
        if not packed:
            return ""
        return (
            f"; {len(packed)} of them are stored as packed integers, where floating point is "
            "expected: an image tower, a module that quantization_config excludes, or all"
        )

    def _expected(self, spec: DecoderSpec) -> Iterator[ExpectedTensor]:
        for tensor in spec.tensors:
            yield from self._layout.get(
                tensor.name,
                (
                    ExpectedTensor(
                        tensor.name,
                        (tensor.stored_shape,),
                        is_optional=tensor.is_optional,
                        place=tensor.other_place,
                    ),
                ),
            )

    def _mismatch(self, name: str, expected: ExpectedTensor) -> str:
        """Return what is wrong with a stored tensor, or an empty string."""
        stored = self._stored[name][1]
        if stored.shape not in expected.shapes:
            return (
                f"{name} is {list(stored.shape)}, config.json implies "
                f"{' or '.join(str(list(x)) for x in expected.shapes)}"
            )
        if stored.dtype in expected.dtypes:
            return ""
        kind = (
            "as floating point"
            if expected.dtypes == FLOAT_DTYPES
            else f"as {' or '.join(sorted(expected.dtypes))}"
        )
        return f"{name} is stored as {stored.dtype}, not {kind}"


def renamed_to(name: str, renamed: Sequence[tuple[str, str]]) -> str:
    """Return the name that the declaration has for a stored tensor."""
    for stored, ours in renamed:
        if name.startswith(stored):
            return ours + name.removeprefix(stored)
    return name


def fill_rows(file: TensorFile, stored: StoredTensor, out: Tensor, first_row: int) -> None:
    """Read rows of a stored tensor, from `first_row` on, into `out` [rows, ...]: straight into it,
    if it is the host's memory."""
    row_bytes = stored.num_bytes // stored.shape[0]
    start = stored.start + first_row * row_bytes
    if out.device.type == "cpu" and out.dtype == _dtype(stored) and out.is_contiguous():
        memory = (ctypes.c_char * out.nbytes).from_address(out.data_ptr())
        return file.read_into(memoryview(memory).cast("B"), start)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, out.shape[0], step):
        part = out[first : first + step]
        values = _read_values(
            file, stored, part.shape, start + first * row_bytes, is_pinned=out.is_cuda
        )
        part.copy_(values, non_blocking=True)  # torch keeps pinned memory until its copy is done


def _read_columns(
    file: TensorFile, stored: StoredTensor, out: Tensor, first_column: int, step: int
) -> None:
    """Columns of a stored matrix [K, N], every `step`th from `first_column` on, into the rows of
    `out` [rows, K]."""
    num_rows, num_columns = stored.shape
    row_bytes = stored.num_bytes // num_rows
    last_column = first_column + step * (out.shape[0] - 1) + 1
    num_at_once = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, num_rows, num_at_once):
        last = min(first + num_at_once, num_rows)
        values = _read_values(
            file, stored, (last - first, num_columns), stored.start + first * row_bytes
        )
        out[:, first:last].copy_(values[:, first_column:last_column:step].T)


def read_stored(file: TensorFile, stored: StoredTensor) -> Tensor:
    """A whole tensor of a file, as it is stored. Raises OSError."""
    return _read_values(file, stored, stored.shape, stored.start)


def read_stored_rows(file: TensorFile, stored: StoredTensor, rows: range) -> Tensor:
    """Neighbouring rows of a tensor of a file, as they are stored. Raises OSError."""
    row_bytes = math.prod(stored.shape[1:]) * _dtype(stored).itemsize
    shape = (len(rows), *stored.shape[1:])
    return _read_values(file, stored, shape, stored.start + rows.start * row_bytes)


def _read_values(
    file: TensorFile,
    stored: StoredTensor,
    shape: Sequence[int],
    start: int,
    *,
    is_pinned: bool = False,
) -> Tensor:
    import torch

    values = torch.empty(tuple(shape), dtype=_dtype(stored), pin_memory=is_pinned)
    file.read_into(
        memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B"), start
    )
    return values


def _dtype(stored: StoredTensor) -> torch.dtype:
    import torch

    return getattr(torch, _DTYPES[stored.dtype])  # type: ignore[no-any-return]


def _read_index(path: Path) -> dict[str, str]:
    """Return the `weight_map` of an index, checked: plain file names only,
    so that no path leads out of the folder."""
    weight_map = read_object(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map object")
    for name, file in weight_map.items():
        is_file_name = (
            isinstance(file, str) and Path(file).name == file and not set(file) & set("\0/\\")
        )
        if not is_file_name or not file.endswith(".safetensors") or len(file) > _MAX_NAME_CHARS:
            raise CheckpointError(
                f"{path}: {_short(name)} is said to be in {_short(repr(file))}; expected the "
                "plain name of a .safetensors file"
            )
    return weight_map


def _names(folder: Path, suffixes: set[str] | frozenset[str]) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.suffix in suffixes and path.is_file()
    )


def _short(text: str) -> str:
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}..."


def _listed(items: list[str]) -> str:
    rest = len(items) - _MAX_SHOWN
    return ", ".join(map(_short, items[:_MAX_SHOWN])) + (f" and {rest} more" if rest > 0 else "")
