"""Safetensors checkpoints, one file or sharded, read one tensor at a time.

A checkpoint is data: it is checked against the declaration (names, shapes, dtypes) before any weight is read, and
nothing in it is ever executed. Pickled formats (.bin, .pt, .pth) are refused. Never holds weights: `fill` copies from
the memory-mapped file straight into the caller's buffer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.declaration import DecoderSpec, TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 64 << 20
_FLOAT_DTYPES = frozenset({"F32", "F16", "BF16", "F64"})
_PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
# Tables that can be computed, and causal masks, which old checkpoints carry along.
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
_MAX_SHOWN = 8
_MAX_MAPPED_BYTES = 64 << 20


class _Stored(NamedTuple):
    """What a file's header says of a tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class SafetensorsCheckpoint:
    """A `WeightSource` over a model folder. Use as a context manager; the file that is mapped closes with it."""

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        """Read the headers of the folder's safetensors files and check them against `spec`; raises CheckpointError."""
        self._folder = folder
        self._mapped: Any = None
        self._mapped_file = ""
        self._num_read_bytes = 0
        self._stored = self._find_tensors()
        self._prefix = self._missing_prefix(spec)
        self._check(spec)

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file that was read last."""
        self._mapped, self._mapped_file, self._num_read_bytes = None, "", 0

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """See `WeightSource.fill`; reads only the rows that `tensor` names."""
        name = self._name(tensor)
        start, stop = tensor.first_row, tensor.first_row + tensor.shape[0]
        try:
            stored = self._map(self._stored[name].file).get_slice(name)
            if tuple(stored.get_shape()) != tensor.stored_shape:
                raise CheckpointError(f"{self._folder}: tensor {name} has changed while it was being loaded")
            out.copy_(stored[:, start:stop].T if tensor.is_transposed else stored[start:stop])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder}: tensor {name} cannot be read: {error}") from error
        self._num_read_bytes += out.nbytes

    def _map(self, file: str) -> Any:
        """The mapped file. Pages once read stay resident while a file is mapped, so it is mapped anew now and then."""
        if file != self._mapped_file or self._num_read_bytes > _MAX_MAPPED_BYTES:
            self.close()
            self._mapped, self._mapped_file = safe_open(self._folder / file, framework="pt"), file
        return self._mapped

    def _find_tensors(self) -> dict[str, _Stored]:
        """Every tensor by name, from the files that the index names or from the only file."""
        if (self._folder / INDEX_NAME).is_file():
            return self._read_shards(_read_index(self._folder / INDEX_NAME))
        candidates = [SINGLE_NAME] if (self._folder / SINGLE_NAME).is_file() else _names(self._folder, {".safetensors"})
        if len(candidates) == 1:
            return self._read_header(candidates[0])
        if candidates:
            raise CheckpointError(
                f"{self._folder} has {len(candidates)} .safetensors files ({_listed(candidates)}) but no {INDEX_NAME}"
            )
        pickled = _names(self._folder, _PICKLED_SUFFIXES)
        if pickled:
            raise CheckpointError(
                f"{self._folder} has only pickled weights ({_listed(pickled)}), which can execute code and are never "
                f"loaded; convert them to safetensors (save_pretrained of transformers does so)"
            )
        raise CheckpointError(f"{self._folder} has no {SINGLE_NAME} and no {INDEX_NAME}")

    def _read_shards(self, index: dict[str, str]) -> dict[str, _Stored]:
        held = {file: self._read_header(file) for file in sorted(set(index.values()))}
        absent = [f"{name} (said to be in {file})" for name, file in index.items() if name not in held[file]]
        if absent:
            raise CheckpointError(f"{self._folder / INDEX_NAME} names tensors that the files lack: {_listed(absent)}")
        return {name: held[file][name] for name, file in index.items()}

    def _read_header(self, file: str) -> dict[str, _Stored]:
        path = self._folder / file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {INDEX_NAME} names it")
        try:
            opened: Any = safe_open(path, framework="pt")
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
            return {name: _Stored(file, tuple(x.get_shape()), str(x.get_dtype())) for name, x in slices.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error

    def _missing_prefix(self, spec: DecoderSpec) -> str:
        """The prefix that a checkpoint of the bare decoder leaves out, or nothing."""
        prefix = spec.optional_prefix
        name = spec.embedding.name
        is_bare = name not in self._stored and name.startswith(prefix) and name[len(prefix) :] in self._stored
        return prefix if is_bare else ""

    def _name(self, tensor: TensorSpec) -> str:
        return tensor.name.removeprefix(self._prefix)

    def _check(self, spec: DecoderSpec) -> None:
        """Every tensor of the declaration is there with its shape and a float dtype, and no other is."""
        expected = {self._name(tensor): tensor.stored_shape for tensor in spec.tensors}
        missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in self._stored]
        if missing:
            raise CheckpointError(f"{self._folder} lacks {len(missing)} tensors: {_listed(missing)}")
        wrong = [line for name, shape in expected.items() if (line := self._mismatch(name, shape))]
        if wrong:
            raise CheckpointError(f"{self._folder} has {len(wrong)} tensors that do not fit: {_listed(wrong)}")
        tied = {"lm_head.weight"} if spec.is_tied else set()
        extra = [n for n in self._stored if n not in expected and n not in tied and not _HARMLESS.fullmatch(n)]
        if extra:
            raise CheckpointError(
                f"{self._folder} has {len(extra)} tensors that {spec.architecture} does not use: {_listed(extra)}"
            )

    def _mismatch(self, name: str, shape: tuple[int, ...]) -> str:
        """What is wrong with a stored tensor, or an empty string."""
        stored = self._stored[name]
        if stored.shape != shape:
            return f"{name} is {list(stored.shape)}, config.json implies {list(shape)}"
        return "" if stored.dtype in _FLOAT_DTYPES else f"{name} is stored as {stored.dtype}, not as floating point"


def _read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index, checked: plain file names only, so that no path leads out of the folder."""
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise CheckpointError(f"{path} is larger than {_MAX_INDEX_BYTES} bytes; that is not an index of tensors")
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map object")
    for name, file in weight_map.items():
        is_plain = isinstance(file, str) and Path(file).name == file and not set(file) & set("\0/\\")
        if not is_plain or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} is said to be in {file!r}; expected the plain name of a .safetensors file")
    return weight_map


def _names(folder: Path, suffixes: set[str] | frozenset[str]) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in suffixes and path.is_file())


def _listed(items: list[str]) -> str:
    rest = len(items) - _MAX_SHOWN
    return ", ".join(items[:_MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
