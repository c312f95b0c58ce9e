"""Versions of adapters: copies of their files that stay as they are as long as requests need them.

An adapter's folder may be written over at any time, by a trainer for instance. So what a request
is served with is a copy, known by the digest of its content: requests that run keep theirs, an
engine that is started anew finds it again, and it is deleted with the last reference to its
`Adapter`. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

from quire.common.small_files import open_regular
from quire.core.adapters import Adapter
from quire.errors import CheckpointError
from quire.lora.identity import content_digest
from quire.lora.layout import FILES, AdapterLimits, check_adapter
from quire.lora.scratch import delete_with, scratch_folder
from quire.models.declaration import DecoderSpec

MAX_REMEMBERED = 256
"""Folders whose version is kept though no request has it now."""

Signature = tuple[tuple[int, ...], ...]
"""By which a folder's files are seen to be those of the last time."""


class AdapterStore:
    """The versions of one model's adapters. Safe in any thread."""

    def __init__(self, spec: DecoderSpec, limits: AdapterLimits) -> None:
        self._spec, self._limits = spec, limits
        self._root, self._delete = scratch_folder(self)
        self._reading = threading.Lock()
        """Held while files are read and copied, which may take minutes."""
        self._lock = threading.Lock()
        """Guards `_remembered`; never held for long."""
        self._versions: weakref.WeakValueDictionary[str, Adapter] = weakref.WeakValueDictionary()
        self._remembered: OrderedDict[Path, tuple[Signature, Adapter]] = OrderedDict()
        self._num_copies = 0

    def version_of(self, folder: Path) -> Adapter:
        """Return the version that a folder holds now. Reads its files where they are new.

        Raises CheckpointError where they are no adapter for the model.
        """
        with self._reading:
            signature = _signature(folder)
            with self._lock:
                known = self._remembered.get(folder)
            adapter = known[1] if known is not None and known[0] == signature else None
            if adapter is None:
                adapter = self._copied(folder)
                if _signature(folder) != signature:
                    raise CheckpointError(f"the adapter {folder} is being written; load it again")
            with self._lock:
                self._remembered[folder] = signature, adapter
                self._remembered.move_to_end(folder)
                while len(self._remembered) > MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
            return adapter

    def forget(self, folder: Path) -> None:
        """Keep a folder's version no longer than requests need it. Returns at once."""
        with self._lock:
            self._remembered.pop(folder, None)

    def close(self) -> None:
        """Delete everything. Idempotent."""
        self._delete()

    def _copied(self, folder: Path) -> Adapter:
        """Make a version of what is copied now: the copy counts, whatever becomes of the folder."""
        self._num_copies += 1
        copy = self._root / str(self._num_copies)
        try:
            copy.mkdir(mode=0o700)
            for name in FILES:
                _copy(folder / name, copy / name)
        except OSError as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise CheckpointError(
                f"the adapter {folder} cannot be read: {error.strerror}"
            ) from None
        try:
            digest = content_digest(copy)
            known = self._versions.get(digest)
            if known is None:
                invocation = check_adapter(copy, self._spec, self._limits)
        except BaseException as error:
            shutil.rmtree(copy, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise CheckpointError(str(error).replace(str(copy), str(folder))) from None
            raise
        if known is not None:
            shutil.rmtree(copy, ignore_errors=True)
            return known
        adapter = self._versions[digest] = Adapter(digest, str(copy), invocation)
        delete_with(adapter, copy)
        return adapter


def _signature(folder: Path) -> Signature:
    found = []
    for name in FILES:
        try:
            status = os.stat(folder / name)
        except (OSError, ValueError):
            raise CheckpointError(
                f"{folder} is not the folder of an adapter: it has no {name}; give one that PEFT "
                "has saved, with safetensors"
            ) from None
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _copy(source: Path, target: Path) -> None:
    """Copy a regular file; a pipe is not waited for."""
    with open_regular(source) as file, target.open("xb") as out:
        shutil.copyfileobj(file, out, 1 << 20)
