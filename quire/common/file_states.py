"""Whether files are still those that were read: their sizes and the times of their last writing.

Weights are read once, and again whenever an engine is replaced. A file that was exchanged in
between would answer with other bits, or not at all; this is how that is noticed, at the cost of
asking the system about each file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from quire.errors import CheckpointError


class FileState(NamedTuple):
    """What writing to a file changes."""

    size: int
    written_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """Make the state from what the system says of a file."""
        return cls(status.st_size, status.st_mtime_ns)


States = Mapping[str, tuple[int, int]]
"""Absolute paths to states, as plain numbers that can be sent to another process."""


def states_of(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Return the states of files. Raises CheckpointError for one that is not there."""
    states = {}
    for path in paths:
        try:
            size, written_ns = FileState.of(path.stat())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        states[str(lasting_name(path))] = (size, written_ns)
    return states


def lasting_name(path: Path) -> Path:
    """Return a name of a file or folder that depends on no other folder: absolute,
    and not by way of one that may vanish."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def check_unchanged(states: States) -> None:
    """Raise CheckpointError, naming the file, if one is not as it was."""
    for name, before in states.items():
        try:
            now = FileState.of(os.stat(name))
        except OSError as error:
            raise CheckpointError(
                f"{name} cannot be read any more: {error.strerror}; {_ADVICE}"
            ) from None
        if now.size != before[0]:
            raise CheckpointError(
                f"{name} has changed since it was read: {before[0]} bytes then, {now.size} "
                f"now; {_ADVICE}"
            )
        if now != FileState(*before):
            raise CheckpointError(f"{name} has been written to since it was read; {_ADVICE}")


_ADVICE = "put the file back, or start anew with the files as they are"
