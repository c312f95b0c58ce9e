"""Temporary folders, and the end of those whose processes were killed.

A killed process deletes nothing; what it leaves may be gigabytes, in a folder that may be memory.
So each folder has a file that its process holds locked, and the process that makes the next one
deletes those whose lock is free. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = "lock"


def make_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder; returns it, and the descriptor by which it is held, for `delete_folder`.

    The name of every one must begin with a prefix that nothing else has.
    """
    root = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    descriptor = -1
    with contextlib.suppress(OSError):  # a file system without locks: it is never swept, then
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(root / ".lock", root / _LOCK)  # which is never seen without being locked
    return root, descriptor


def delete_folder(folder: Path, descriptor: int) -> None:
    """Delete a folder, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)
    if descriptor >= 0:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder for the length of a `with`."""
    root, descriptor = make_folder(parent, prefix)
    try:
        yield root
    finally:
        delete_folder(root, descriptor)


def sweep_folders(parent: Path, prefix: str) -> None:
    """Delete this user's folders that no process holds."""
    for folder in parent.glob(f"{prefix}*"):
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
