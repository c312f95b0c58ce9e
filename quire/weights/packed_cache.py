"""Projections as they were packed, kept in a file for the next start: what was quantized or
repacked once is only read.

The file is a safetensors file: bytes as `CpuLinear` has them, how to read each, and a checksum of
all. Owns its name, which holds a digest of everything that decides the bytes, and the memory that
it is read into, which begins while torch is still being imported. A file that is foreign, damaged
or of another version is left unread and written anew; a cache that cannot be written costs a
warning. Nothing in it can be executed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import logging
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.common.pages import reserve
from quire.errors import CheckpointError, ConfigError
from quire.models.tensors import LinearSpec, TensorSpec
from quire.weights.source import WeightSource
from quire.weights.tensor_file import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.cpu.linear import CpuLinear
    from quire.kernels.interface import PackedLinear

logger = logging.getLogger(__name__)

SUFFIX = ".packed.safetensors"
_READ_TIMEOUT_S = 600.0
"""For a file on a slow network drive; whatever takes longer is treated as damaged."""
_LOCKED_AFTER_S = 10.0
"""A file that is younger may not have its writer's lock yet."""
BIAS = ".bias"
_MAX_NAMED = 4
"""Parts of a projection whose names are all in its own."""

Parts = Sequence[LinearSpec]


class CacheName(NamedTuple):
    """Which model in which form."""

    label: str
    """For people; a new file of a label replaces the old ones."""
    digest: str
    """Of everything that decides the bytes."""

    def path(self, folder: Path, suffix: str = SUFFIX) -> Path:
        """Return where the file lies."""
        return folder / f"{self.label}-{self.digest}{suffix}"


def check_folder(folder: Path) -> None:
    """Make the folder where there is none yet, and say so where it can only be read: nothing may be
    written to it before the model has been loaded. Raises ConfigError where it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.scandir(folder).close()
    except OSError as error:
        raise ConfigError(
            f"weights_cache={str(folder)!r} cannot be used: {error.strerror}; give another folder, "
            "or leave it out"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        logger.warning(
            "weights_cache=%r cannot be written: what it holds is used, and nothing is added",
            str(folder),
        )


class PackedCache:
    """The file of one model in a folder, and what was found in it."""

    def __init__(self, folder: Path, name: CacheName, wanted: Iterable[Parts]) -> None:
        """Begin to read the file, if there is one that fits;
        `wanted` are the projections that it is for."""
        self._folder, self._name = folder, name
        self._wanted = {key_of(parts) for parts in wanted}
        self._file = self._open()

    def over(self, weights: WeightSource) -> WeightSource:
        """`weights`, with the projections of this file packed already."""
        return weights if self._file is None else _CachedWeights(weights, self._file)

    def keep(self, projections: Iterable[tuple[Parts, PackedLinear]]) -> None:
        """Write the file for the next start, unless it was read in this one."""
        if self._file is not None and not self._file.is_damaged:
            return
        from quire.kernels.cpu.linear import CpuLinear

        kept = {
            key_of(parts): linear for parts, linear in projections if key_of(parts) in self._wanted
        }
        packed = {key: linear for key, linear in kept.items() if isinstance(linear, CpuLinear)}
        path = self._name.path(self._folder)
        try:
            _write(path, packed, self._name.digest)
        except OSError as error:
            logger.warning("packed weights could not be kept in %s: %s", path, error)
            return
        logger.info("packed weights are kept in %s", path)
        self._remove_former(path)

    def _open(self) -> _PackedFile | None:
        path = self._name.path(self._folder)
        try:
            if not path.exists():
                return None
            check_owner(path)
            return _PackedFile(path, self._name.digest, self._wanted)
        except (CheckpointError, OSError) as error:
            logger.warning("packed weights in %s are not used: %s", path, error)
            return None

    def _remove_former(self, newest: Path) -> None:
        for path in self._folder.glob(f"{self._name.label}-*{SUFFIX}"):
            if path != newest:
                with contextlib.suppress(OSError):
                    path.unlink()


class _CachedWeights:
    """Implements `WeightSource`."""

    def __init__(self, weights: WeightSource, file: _PackedFile) -> None:
        self._weights, self._file = weights, file

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        self._weights.fill(out, tensor)

    def table(self, tensor: TensorSpec) -> Tensor | None:
        return self._weights.table(tensor)

    def packed(self, parts: Parts) -> PackedLinear | None:
        return self._file.linear(key_of(parts)) or self._weights.packed(parts)


class _PackedFile:
    """A file that a thread is reading."""

    def __init__(self, path: Path, digest: str, wanted: set[str]) -> None:
        """Raises CheckpointError where it is not what was written under this digest."""
        self._path = path
        self._file = TensorFile(path)
        self.is_damaged = False
        try:
            self._layouts, self._checksum = _description(self._file.metadata, digest)
            if self._layouts.keys() != wanted:
                raise CheckpointError("it holds other projections")
        except CheckpointError:
            self._file.close()
            raise
        tensors = self._file.tensors.values()
        self._first = min((tensor.start for tensor in tensors), default=0)
        self._num_bytes = sum(tensor.num_bytes for tensor in tensors)
        self._region = reserve(self._num_bytes)
        self._thread = threading.Thread(target=self._read, name="packed-weights", daemon=True)
        self._thread.start()

    def linear(self, key: str) -> CpuLinear | None:
        """Return a projection; None where it is not here, or the file turned out to be damaged."""
        self._thread.join(_READ_TIMEOUT_S)
        if self._thread.is_alive():
            self.is_damaged = True
        if self.is_damaged or key not in self._layouts:
            return None
        from quire.kernels.cpu.linear import CpuLinear, PackedLayout

        bias = self._bytes(key + BIAS)
        data = self._bytes(key)
        if data is None:
            return None
        import torch

        try:
            layout = PackedLayout(*self._layouts[key])
            return CpuLinear(layout, data, None if bias is None else bias.view(torch.float32))
        except (ValueError, TypeError, RuntimeError) as error:  # it does not describe the bytes
            logger.warning("packed weights in %s are not used: %s", self._path, error)
            self.is_damaged = True
            return None

    def _bytes(self, name: str) -> Tensor | None:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            return None
        import torch

        return torch.frombuffer(
            self._region,
            dtype=torch.uint8,
            count=tensor.num_bytes,
            offset=tensor.start - self._first,
        )

    def _read(self) -> None:
        """Read in few long calls: each return from one waits for the interpreter's lock,
        which the import of torch holds."""
        memory = memoryview(self._region)[: self._num_bytes]
        try:
            self._file.read_into(memory, self._first)
            if (
                zlib.crc32(memory, zlib.crc32(self._file.metadata["layouts"].encode()))
                != self._checksum
            ):
                raise CheckpointError("the checksum is not that which it was written with")
        except (CheckpointError, OSError) as error:
            logger.warning("packed weights in %s are not used: %s", self._path, error)
            self.is_damaged = True
        finally:
            self._file.close()


def version() -> str:
    """Return what a file's bytes are read by."""
    from quire.kernels.cpu import _native

    return f"quire packed weights 1, {_native.WEIGHT_LAYOUT}"


def key_of(parts: Parts) -> str:
    """Return a name for a stacked projection that no other one of its model has."""
    named = parts if len(parts) <= _MAX_NAMED else parts[:1]  # experts are hundreds
    rest = f"+{len(parts) - 1}" if len(named) < len(parts) else ""
    return (
        "+".join(
            f"{part.weight.name}[{part.weight.first_row}:{part.num_outputs}]" for part in named
        )
        + rest
    )


def check_owner(path: Path) -> None:
    """CheckpointError where another user could have written the file."""
    for each in (path, path.parent):
        status = each.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise CheckpointError(f"{each} can be written by other users")


def _description(metadata: Mapping[str, str], digest: str) -> tuple[dict[str, list[Any]], int]:
    """Return the layout of each projection, and the checksum;
    CheckpointError unless all is of this version and digest."""
    if metadata.get("version") != version() or metadata.get("digest") != digest:
        raise CheckpointError("it was written for another model or by another version")
    try:
        layouts, checksum = json.loads(metadata["layouts"]), int(metadata["checksum"])
    except (ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"its description cannot be read: {error}") from error
    if not isinstance(layouts, dict) or not all(
        isinstance(each, list) and len(each) == 6 for each in layouts.values()
    ):
        raise CheckpointError("its description cannot be read")
    return layouts, checksum


def _write(path: Path, projections: Mapping[str, CpuLinear], digest: str) -> None:
    """Write under another name, then rename: a reader sees a whole file or none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors: dict[str, memoryview] = {
        key: linear.data.numpy().data for key, linear in projections.items()
    }
    # after the weights, whose sizes keep one another aligned
    for key, linear in projections.items():
        if linear.bias is not None:
            tensors[key + BIAS] = linear.bias.numpy().data.cast("B")
    layouts = json.dumps({key: astuple(linear.layout) for key, linear in projections.items()})
    checksum = zlib.crc32(layouts.encode())
    for data in tensors.values():
        checksum = zlib.crc32(data, checksum)
    metadata = {
        "version": version(),
        "digest": digest,
        "layouts": layouts,
        "checksum": str(checksum),
    }
    descriptor, name = temporary_of(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(header_of({name: each.nbytes for name, each in tensors.items()}, metadata))
            for data in tensors.values():
                file.write(data)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def temporary_of(path: Path) -> tuple[int, str]:
    """Create a file beside `path` under another name, locked while it is open; return its
    descriptor and name. Those that were left by killed processes are removed."""
    remove_abandoned(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with contextlib.suppress(OSError):  # where there are no locks, nothing is removed either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor, name


def remove_abandoned(path: Path) -> None:
    """Remove what `temporary_of` created and no process writes any more."""
    for each in path.parent.glob(f"{glob.escape(path.stem)}*"):
        if each.suffix == path.suffix:
            continue
        with contextlib.suppress(OSError), each.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _LOCKED_AFTER_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                each.unlink()


def header_of(sizes: Mapping[str, int], metadata: Mapping[str, str], length: int = 0) -> bytes:
    """Return a safetensors header of tensors of bytes, which follow one another; of at least
    `length` bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    encoded = encoded.ljust(length - 8)
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded
