"""A folder for as long as its process lives, and the end of those whose processes were killed.

A killed process deletes nothing; copies of adapters may be gigabytes, in a folder that may be
memory. So each folder has a file that its process holds locked, and the process that makes the next
one deletes those whose lock is free. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

_PREFIX, _LOCK = "quire-adapters-", "lock"


def scratch_folder(owner: object) -> tuple[Path, Callable[[], object]]:
    """Make a folder; returns it, and what deletes it, at the latest when `owner` is gone."""
    _sweep(Path(tempfile.gettempdir()))
    root = Path(tempfile.mkdtemp(prefix=_PREFIX))
    descriptor = -1
    with contextlib.suppress(OSError):  # a file system without locks: it is never swept, then
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(root / ".lock", root / _LOCK)  # which is never seen without being locked
    return root, weakref.finalize(owner, _delete, root, descriptor, os.getpid())


def delete_with(owner: object, folder: Path) -> None:
    """Delete a folder when `owner` is gone."""
    weakref.finalize(owner, _delete, folder, -1, os.getpid())


def _delete(folder: Path, descriptor: int, process: int) -> None:
    if os.getpid() != process:
        return  # a fork, whose end is not that of the folder
    shutil.rmtree(folder, ignore_errors=True)
    if descriptor >= 0:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Delete this user's folders that no process holds."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(folder / _LOCK, flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
