"""The folder in which a server keeps what shall survive it: held by one server at a time, and
written to in few ways.

Owns the lock, the knowledge whether the folder is still the one that was locked, and every write: a
file is replaced whole, or grows at its known end, and what a disk takes only in part is taken back.
Blocking: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

from quire.errors import ConfigError
from quire.server.http.errors import ApiError, useless_to_retry

logger = logging.getLogger(__name__)

STORAGE_FAILED = "storage_failed"
"""The code of errors that are the disk's."""
_LOCK = ".lock"
_PIECE_BYTES = 1 << 20
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class DataFolder:
    """One folder. Raises ConfigError where it cannot be made or another server has it."""

    def __init__(self, root: str | Path) -> None:
        self.root, named = Path(root), f"data_folder={str(root)!r}"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
                raise ConfigError(f"{named} cannot be written; choose another")
            self._lock = self._take_lock()
        except BlockingIOError:
            message = f"{named} is used by another server; give each its own"
            raise ConfigError(message) from None
        except OSError as error:
            message = f"{named} cannot be used: {error.strerror}; choose another"
            raise ConfigError(message) from None

    def close(self) -> None:
        """Leave the folder to others."""
        self._lock.close()

    def is_another(self) -> bool:
        """Return whether there is another folder now in the place of the one that was locked; if
        so, it is locked from here on. Raises ApiError 507 where there is none.
        """
        try:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat((self.root / _LOCK).stat(), os.fstat(self._lock.fileno())):
                    return False
            lock = self._take_lock()
        except OSError as error:
            raise storage_failed(error) from error
        self._lock.close()
        self._lock = lock
        return True

    def folder(self, *parts: str) -> Path:
        """Return a folder below the root, made where it is missing. Never makes the root: it may be
        a disk that is not mounted. Raises ApiError 507.
        """
        folder = self.root
        for part in parts:
            folder = folder / part
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise storage_failed(error) from error
        return folder

    def replace(self, path: Path, data: bytes) -> None:
        """Write a file, whole or not at all. Raises ApiError 507."""
        self._make(path, lambda target: self._write(target, data))

    def copy(self, path: Path, source: BinaryIO) -> None:
        """Write a file with what is left of `source`, whole or not at all. Raises ApiError 507."""

        def write(target: IO[bytes]) -> None:
            while piece := source.read(_PIECE_BYTES):
                self._write(target, piece)

        self._make(path, write)

    def append(self, path: Path, data: bytes, known_size: int) -> None:
        """Write behind a file's known end, all of it or nothing. Raises ApiError 507, also where
        the file is not as it was left.
        """
        try:
            with path.open("r+b" if known_size else "wb", buffering=0) as target:
                if os.fstat(target.fileno()).st_size < known_size:
                    raise OSError(errno.ESTALE, "the file has lost something")
                target.truncate(known_size)
                target.seek(known_size)
                try:
                    self._write(target, data)
                except OSError:
                    target.truncate(known_size)
                    if not known_size:
                        path.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise storage_failed(error) from error

    def truncate(self, path: Path, num_bytes: int) -> None:
        """Drop a file's end. Raises ApiError 507."""
        try:
            os.truncate(path, num_bytes)
        except OSError as error:
            raise storage_failed(error) from error

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there. Raises ApiError 507."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_failed(error) from error

    def _make(self, path: Path, write: Callable[[IO[bytes]], None]) -> None:
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("wb", buffering=0) as target:
                write(target)
            temporary.replace(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise storage_failed(error) from error
            raise

    def _write(self, target: IO[bytes], data: bytes) -> None:
        """Write bytes to the disk; nothing else does."""
        left = memoryview(data)
        while left:
            left = left[target.write(left) :]

    def _take_lock(self) -> IO[bytes]:
        """Raises OSError; BlockingIOError where another server has it."""
        lock = (self.root / _LOCK).open("ab", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning(
                    "the data folder's file system has no locks: see to it that no other "
                    "server uses it"
                )
                return lock
            lock.close()
            raise
        return lock


def storage_failed(error: OSError) -> ApiError:
    """507 for a disk that is full, gone or may not be written: the operator's affair,
    and useless to repeat at once."""
    logger.error(
        "the data folder cannot be used: %s",
        errno.errorcode.get(error.errno or 0, type(error).__name__),
    )
    message = "the server cannot get at what it stores now: its disk is full, read-only or gone"
    return useless_to_retry(ApiError(507, message, code=STORAGE_FAILED))
