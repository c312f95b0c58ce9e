"""Where a worker's weights and KV cache are: in memory, or, while the engine sleeps, given back to
the system.

Owns which parts are gone, and the file that keeps weights meanwhile. Addresses stay: pages are
discarded under the tensors and filled again in place, so that nothing which points to a weight
learns of it. The KV cache's content is lost; that it counts as cached no more is the control
plane's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.common.file_states import States
from quire.common.numbers import format_bytes
from quire.common.pages import discard
from quire.common.residence import KV_CACHE, PARTS, WEIGHTS
from quire.errors import CheckpointError, EngineError, NotAvailableError
from quire.worker.memory import KVMemory

logger = logging.getLogger(__name__)

_ONLY_DECODERS = (
    "update_weights: those beside the decoder (of images, vectors) could not be loaded; build "
    "another engine"
)
_CHUNK_BYTES = 32 << 20
"""Of a transfer between file and memory: some milliseconds each, so that threads share the work."""


Source = str | Mapping[str, Tensor]
"""A folder with a checkpoint, or tensors by a checkpoint's names."""


class Loaded(NamedTuple):
    """Weights that are in memory, and how they are loaded again."""

    weights: Sequence[Tensor]
    form: object
    """What their layout depends on besides shapes."""
    reload: Callable[[], Loaded] | None
    """None where they were given."""
    path: str = ""
    """Of the files that they were read from, and the states of these."""
    states: States = MappingProxyType({})


class Beside(NamedTuple):
    """Tensors that are not the decoder's: what reads images, what drafts."""

    weights: Sequence[Tensor] = ()
    """That are never loaded again, but read back from a file."""
    caches: Sequence[Tensor] = ()
    """Whose content counts no more after a sleep."""


class Residence(Protocol):
    """Memory that may go and return. No step is in flight when it does."""

    def sleep(self, level: int) -> None:
        """Give everything back, the decoder's weights kept in a file (1) or discarded (2). Raises
        NotAvailableError where that cannot be, EngineError where a file cannot be written; then
        everything is as it was."""
        ...

    def wake(self, parts: Iterable[str]) -> None:
        """Bring some of `PARTS` back. Raises CheckpointError or EngineError where weights cannot
        be: they are still gone then."""
        ...

    def load(self, source: Source) -> Loaded:
        """Load other weights of the same form beside those in memory. For any thread; steps may go
        on. Raises a QuireError."""
        ...

    def replace(self, loaded: Loaded) -> None:
        """Have the weights in memory be those that were loaded; nothing is in flight. Raises
        CheckpointError, and changes nothing, for those of another form."""
        ...


class Fixed:
    """Memory that stays. Implements `Residence`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def sleep(self, level: int) -> None:
        """Raise NotAvailableError."""
        raise NotAvailableError(f"sleep: {self._reason}")

    def wake(self, parts: Iterable[str]) -> None:
        """Do nothing: all is there."""

    def load(self, source: Source) -> Loaded:
        """Raise NotAvailableError."""
        raise NotAvailableError(f"update_weights: {self._reason}")

    def replace(self, loaded: Loaded) -> None:
        """Never: nothing is loaded."""
        raise AssertionError("nothing was loaded")


class _Extent(NamedTuple):
    """Memory of a tensor."""

    address: int
    num_bytes: int


def _extents(tensors: Iterable[Tensor]) -> list[_Extent]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return list({_Extent(each.data_ptr(), each.nbytes()): None for each in storages})


class Returnable:
    """Host memory of weights and of a KV cache. Implements `Residence`."""

    def __init__(
        self,
        loaded: Loaded,
        memory: KVMemory,
        folder: Path | None,
        num_threads: int,
        *,
        beside: Beside,
        load: Callable[[Source], Loaded] | None = None,
        is_populated: bool = False,
    ) -> None:
        """`load` loads weights as `loaded` were; None where that cannot be. Files are made in
        `folder`, by default the system's for temporary ones. A cache that `is_populated` is
        resident as a whole when it returns."""
        self._weights, self._form, self._reload = loaded[:3]
        self._memory, self._load_from = memory, load
        self._folder, self._num_threads, self._is_populated = folder, num_threads, is_populated
        self._caches = beside.caches
        shared = set(_extents(self._weights))
        self._beside = [each for each in _extents(beside.weights) if each not in shared]
        self._file: int | None = None
        """Descriptor of a file without a name that has weights as they are: those beside the
        decoder, and behind them, where `_is_whole`, the decoder's."""
        self._is_whole = False
        self._gone: set[str] = set()

    def sleep(self, level: int) -> None:
        """See `Residence.sleep`."""
        assert not self._gone, "it sleeps already"
        self._write(is_whole=level == 1)
        self._gone = set(PARTS)  # before it is: what is interrupted then returns as a whole
        caches = _extents((*self._memory.tensors, *self._caches))
        gone = (*_extents(self._weights), *self._beside, *caches)
        num_bytes = sum(discard(*each) for each in gone)
        logger.info("asleep: %s went back to the system", format_bytes(num_bytes))

    def wake(self, parts: Iterable[str]) -> None:
        """See `Residence.wake`."""
        for part in self._gone.intersection(parts):
            if part == WEIGHTS:
                self._restore()
            elif part == KV_CACHE and self._is_populated:
                self._memory.populate(self._num_threads)
            self._gone.discard(part)

    def load(self, source: Source) -> Loaded:
        """See `Residence.load`."""
        if self._load_from is None:
            raise NotAvailableError(_ONLY_DECODERS)
        return self._load_from(source)

    def replace(self, loaded: Loaded) -> None:
        """See `Residence.replace`."""
        was_gone = WEIGHTS in self._gone
        self._gone.add(WEIGHTS)  # until all of them are there; else `wake` brings the former back
        try:
            if was_gone:
                self._read_file(self._beside)
            copy_over(self._weights, loaded.weights, (self._form, loaded.form))
        except CheckpointError:
            if not was_gone:
                self._gone.discard(WEIGHTS)
            raise
        self._reload = loaded.reload
        self.close()  # it has the former ones
        self._gone.discard(WEIGHTS)

    def close(self) -> None:
        """Forget the file. Idempotent."""
        descriptor, self._file, self._is_whole = self._file, None, False
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _write(self, *, is_whole: bool) -> None:
        """Keep weights in a file, unless an earlier sleep has: the decoder's where it `is_whole`,
        and those beside it in any case."""
        if self._file is not None and self._is_whole == is_whole:
            return
        self.close()
        kept = [*self._beside, *(_extents(self._weights) if is_whole else ())]
        if not kept:
            return
        folder = self._folder if self._folder is not None else Path(tempfile.gettempdir())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=folder, prefix="asleep-")
            os.unlink(name)
        except OSError as error:
            raise self._unwritten(folder, error) from error
        try:
            self._transfer(descriptor, os.pwritev, kept)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise self._unwritten(folder, error) from error
            raise
        self._file, self._is_whole = descriptor, is_whole

    @staticmethod
    def _unwritten(folder: Path, error: OSError) -> EngineError:
        return EngineError(
            f"sleep: the weights cannot be kept in {folder}: {error.strerror}; make room, choose "
            "another folder (weights_cache, else TMPDIR), or take level 2"
        )

    def _restore(self) -> None:
        if self._is_whole:
            self._read_file([*self._beside, *_extents(self._weights)])
        else:
            self._read_file(self._beside)
            self._load()

    def _read_file(self, extents: Sequence[_Extent]) -> None:
        """Read back what a file begins with."""
        if not extents:
            return
        assert self._file is not None
        try:
            self._transfer(self._file, os.preadv, extents)
        except OSError as error:
            raise EngineError(f"the weights cannot be read back: {error.strerror}") from error

    def _load(self) -> None:
        """Copy weights that are loaded anew to where they were."""
        if self._reload is None:
            raise EngineError(
                "the weights were discarded, and a program had given them: give them again, or "
                "others, with update_weights"
            )
        again = self._reload()
        copy_over(self._weights, again.weights, (self._form, again.form))

    def _transfer(
        self,
        descriptor: int,
        move: Callable[[int, list[memoryview], int], int],
        extents: Sequence[_Extent],
    ) -> None:
        """Move memory from or to a file, in several threads. Raises OSError."""
        pieces, offset = list[tuple[memoryview, int]](), 0
        for address, num_bytes in extents:
            memory = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
            for start in range(0, num_bytes, _CHUNK_BYTES):
                pieces.append((memory[start : start + _CHUNK_BYTES], offset + start))
            offset += num_bytes

        def move_all(piece: tuple[memoryview, int]) -> None:
            part, place = piece
            while part:
                count = move(descriptor, [part], place)
                if not count:
                    raise OSError(0, "the file is shorter than what was written")
                part, place = part[count:], place + count

        with ThreadPoolExecutor(self._num_threads) as threads:
            for _ in threads.map(move_all, pieces):
                pass


def copy_over(
    weights: Sequence[Tensor], fresh: Sequence[Tensor], forms: tuple[object, object]
) -> None:
    """Give weights the values of others, of the same form and shapes in the same order, whose
    memory goes back to the system meanwhile. Raises CheckpointError, and changes nothing, for any
    others."""
    shapes = [[(each.shape, each.dtype) for each in tensors] for tensors in (weights, fresh)]
    if shapes[0] != shapes[1] or forms[0] != forms[1]:
        raise CheckpointError(
            "the weights do not have the form of those in memory: they would be packed or "
            "quantized otherwise; build another engine of them"
        )
    copied = set[int]()
    with torch.inference_mode():
        for old, new in zip(weights, fresh, strict=True):
            if new.data_ptr() in copied:  # two names of one tensor
                continue
            copied.add(new.data_ptr())
            old.copy_(new)
            with contextlib.suppress(OSError):  # what is not given back now is when it is dropped
                storage = new.untyped_storage()
                discard(storage.data_ptr(), storage.nbytes())
