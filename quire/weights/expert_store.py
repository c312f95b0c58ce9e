"""Experts in a file of their own, for a pool in memory to read them from as they are needed.

A safetensors file beside the packed weights: the bytes of each stacked weight as it was packed, a
checksum of each expert, and one of everything that says how they are read. It is written layer by
layer while the model is loaded for the first time, so that no more than one layer's experts are in
memory, and read by every later start. Unlike packed weights, it is no copy of what can be had
otherwise while the engine runs: one that is damaged is an error.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from quire.common.numbers import align_up, format_bytes
from quire.errors import CapacityError, CheckpointError
from quire.models.tensors import TensorSpec
from quire.weights.packed_cache import (
    BIAS,
    CacheName,
    Parts,
    check_owner,
    header_of,
    key_of,
    remove_abandoned,
    temporary_of,
    version,
)
from quire.weights.source import WeightSource
from quire.weights.tensor_file import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.cpu.paging import PagedExperts, PagedLinear, StoredWeight
    from quire.kernels.interface import PackedLinear

logger = logging.getLogger(__name__)

SUFFIX = ".experts.safetensors"
_SUMS = "checksums"
_HEADER_BYTES = 1 << 12
_BYTES_PER_WEIGHT = 1 << 10
"""Of the header: a weight's name three times, and some twenty numbers."""
_SUM_BYTES = 8
_ALIGNMENT = 64
"""Of the bytes behind the header, as kernels like them."""


class Mixture(NamedTuple):
    """One layer's experts, as the model declares them."""

    up: Parts
    down: Parts
    num_experts: int


class ExpertStore:
    """The experts' file of one model, and the pool over it."""

    def __init__(
        self,
        folder: Path,
        name: CacheName,
        mixtures: Sequence[Mixture],
        *,
        num_bytes: int,
        least: int,
    ) -> None:
        """Open the file, if there is one; the pool gets `num_bytes` and must hold `least` experts.
        Raises CheckpointError for a file that is not what was written."""
        self._path = name.path(folder, SUFFIX)
        self._label, self._digest = name
        self._mixtures, self._num_bytes, self._least = mixtures, num_bytes, least
        self._num_experts = {
            key_of(parts): each.num_experts for each in mixtures for parts in (each.up, each.down)
        }
        self._linears: dict[str, PagedLinear] = {}
        self._writer: _Writer | None = None
        self.pool: PagedExperts | None = None
        """There once all experts are."""
        if self._path.exists():
            self._open()

    def over(self, weights: WeightSource) -> WeightSource:
        """`weights`, with the experts that the file has."""
        return weights if self.pool is None else _PagedWeights(weights, self._linears)

    def keep(self, parts: Parts, linear: PackedLinear) -> PackedLinear:
        """Put experts that were packed into the file, and return them without memory; anything
        else as it is. The last ones complete the file, and with it the pool."""
        key = key_of(parts)
        if key not in self._num_experts:
            return linear
        from quire.kernels.cpu.linear import CpuLinear
        from quire.kernels.cpu.paging import PagedLinear

        assert isinstance(linear, CpuLinear), "only native weights are paged"
        if self._writer is None:
            self._writer = _Writer(self._path, list(self._num_experts))
        self._writer.add(key, linear, self._num_experts[key])
        self._linears[key] = PagedLinear(linear.layout, linear.bias)
        if len(self._linears) == len(self._num_experts):
            self._writer.finish(self._digest)
            self._remove_former()
            self._open()
        return self._linears[key]

    def close(self) -> None:
        """Leave nothing of a file that was not completed. Idempotent."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> None:
        check_owner(self._path)
        with contextlib.closing(TensorFile(self._path)) as file:
            stored = self._stored(file)
            from quire.kernels.cpu.paging import PagedExperts

            self.pool = PagedExperts(
                self._path,
                file.descriptor,
                [(stored[key_of(each.up)], stored[key_of(each.down)]) for each in self._mixtures],
                self._num_bytes,
                self._least,
            )

    def _stored(self, file: TensorFile) -> dict[str, StoredWeight]:
        """Return what the file has of each weight."""
        from quire.kernels.cpu.paging import StoredWeight, paged

        sums = array.array("Q", self._read(file, _SUMS))
        if sums.itemsize != _SUM_BYTES:
            raise AssertionError("a checksum has 64 bits")
        layouts = self._layouts(file, sums)
        found, first = dict[str, StoredWeight](), 0
        for key, count in self._num_experts.items():
            try:
                bias = self._bias(file, key)
                weight = self._linears.setdefault(key, paged(layouts[key], bias))
                if file.tensors[key].num_bytes != weight.layout.num_bytes:
                    raise ValueError("a weight of another size")
            except (KeyError, ValueError, TypeError, RuntimeError) as error:
                raise self._damaged(f"{key} cannot be read: {error}") from None
            checksums = sums[first : first + count].tolist()
            found[key] = StoredWeight(weight, file.tensors[key].start, checksums)
            first += count
        return found

    def _layouts(self, file: TensorFile, sums: array.array[int]) -> dict[str, Any]:
        """Return how each weight is read; CheckpointError unless all is of this version and
        digest, and what was written."""
        metadata = file.metadata
        if metadata.get("version") != version() or metadata.get("digest") != self._digest:
            raise self._damaged("it was written for another model or by another version")
        try:
            layouts, checksum = json.loads(metadata["layouts"]), int(metadata["checksum"])
        except (ValueError, KeyError, RecursionError) as error:
            raise self._damaged(f"its description cannot be read: {error}") from None
        is_whole = len(sums) == sum(self._num_experts.values()) and checksum == _checksum(
            metadata["layouts"], sums.tobytes()
        )
        if not is_whole or not isinstance(layouts, dict) or set(layouts) != set(self._num_experts):
            raise self._damaged("its description is not what was written")
        return layouts

    def _bias(self, file: TensorFile, key: str) -> Tensor | None:
        if key + BIAS not in file.tensors:
            return None
        import torch

        return torch.frombuffer(self._read(file, key + BIAS), dtype=torch.uint8)

    def _read(self, file: TensorFile, name: str) -> bytearray:
        """Return a small tensor's bytes."""
        tensor = file.tensors.get(name)
        if tensor is None:
            raise self._damaged(f"it has no {name}")
        data = bytearray(tensor.num_bytes)
        try:
            file.read_into(memoryview(data), tensor.start)
        except OSError as error:
            raise self._damaged(str(error)) from None
        return data

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"experts in {self._path}: {what}; delete the file, and the next start writes it anew"
        )

    def _remove_former(self) -> None:
        remove_abandoned(self._path)
        for path in self._path.parent.glob(f"{self._label}-*{SUFFIX}"):
            if path != self._path:
                with contextlib.suppress(OSError):
                    path.unlink()


class _PagedWeights:
    """Implements `WeightSource`."""

    def __init__(self, weights: WeightSource, linears: dict[str, PagedLinear]) -> None:
        self._weights, self._linears = weights, linears

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        self._weights.fill(out, tensor)

    def table(self, tensor: TensorSpec) -> Tensor | None:
        return self._weights.table(tensor)

    def packed(self, parts: Parts) -> PackedLinear | None:
        return self._linears.get(key_of(parts)) or self._weights.packed(parts)


class _Writer:
    """A file that is being written under another name."""

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self._path = path
        self._sizes: dict[str, int] = {}
        self._biases: dict[str, Any] = {}
        self._layouts: dict[str, tuple[Any, ...]] = {}
        self._sums = array.array("Q")
        self._keys = keys
        length = _HEADER_BYTES + sum(4 * len(key) + _BYTES_PER_WEIGHT for key in keys)
        self._length = align_up(length, _ALIGNMENT)
        self._file: BinaryIO | None = None
        with self._reporting():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, self._temporary = temporary_of(path)
            self._file = os.fdopen(descriptor, "wb")
            self._file.seek(self._length)

    def add(self, key: str, linear: Any, num_experts: int) -> None:
        """Write one weight; in the order of the keys."""
        from quire.kernels.cpu.paging import checksums

        assert self._file is not None and key == self._keys[len(self._layouts)]
        self._check_room(linear.data.nbytes)
        self._sums.extend(checksums(linear, num_experts))
        self._layouts[key] = astuple(linear.layout)
        self._sizes[key] = linear.data.nbytes
        if linear.bias is not None:
            self._biases[key + BIAS] = linear.bias.numpy().data.cast("B")
        with self._reporting():
            self._file.write(linear.data.numpy().data)

    def finish(self, digest: str) -> None:
        """Complete the file and give it its name: a reader sees a whole one or none."""
        assert self._file is not None
        rest = {**self._biases, _SUMS: memoryview(self._sums).cast("B")}
        layouts = json.dumps(self._layouts)
        metadata = {
            "version": version(),
            "digest": digest,
            "layouts": layouts,
            "checksum": str(_checksum(layouts, self._sums.tobytes())),
        }
        sizes = {**self._sizes, **{name: data.nbytes for name, data in rest.items()}}
        header = header_of(sizes, metadata, self._length)
        assert len(header) == self._length, "the header takes more than was left for it"
        with self._reporting():
            for data in rest.values():
                self._file.write(data)
            self._file.seek(0)
            self._file.write(header)
            self._file.close()
            os.replace(self._temporary, self._path)
        self._file = None
        logger.info("experts are kept in %s", self._path)

    def close(self) -> None:
        """Remove what was not completed. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)

    def _check_room(self, num_bytes: int) -> None:
        """Refuse what cannot be completed while little of it is written."""
        left = len(self._keys) - len(self._layouts)
        free = shutil.disk_usage(self._path.parent).free
        if left * num_bytes // 2 > free:
            raise CapacityError(
                f"{self._path.parent} has {format_bytes(free)} free, and the experts that are "
                f"still to be written take more than {format_bytes(left * num_bytes // 2)}; give "
                "another weights_cache"
            )

    @contextlib.contextmanager
    def _reporting(self) -> Any:
        try:
            yield
        except OSError as error:
            self.close()
            raise CheckpointError(f"experts cannot be kept in {self._path}: {error}") from None


def _checksum(layouts: str, sums: bytes) -> int:
    return zlib.crc32(sums, zlib.crc32(layouts.encode()))
