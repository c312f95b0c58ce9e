"""A folder for copies of adapters, for as long as its owner and its process live.
Imports no torch."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from quire.common.scratch import delete_folder, make_folder, sweep_folders

_PREFIX = "quire-adapters-"


def scratch_folder(owner: object) -> tuple[Path, Callable[[], object]]:
    """Make a folder; returns it, and what deletes it, at the latest when `owner` is gone."""
    parent = Path(tempfile.gettempdir())
    sweep_folders(parent, _PREFIX)
    root, descriptor = make_folder(parent, _PREFIX)
    return root, weakref.finalize(owner, _delete, root, descriptor, os.getpid())


def delete_with(owner: object, folder: Path) -> None:
    """Delete a folder when `owner` is gone."""
    weakref.finalize(owner, _delete, folder, -1, os.getpid())


def _delete(folder: Path, descriptor: int, process: int) -> None:
    if os.getpid() == process:  # a fork's end is not that of the folder
        delete_folder(folder, descriptor)
