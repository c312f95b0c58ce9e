"""Whether files are still those that were read: their sizes, the times of their last writing, and
samples of their bytes.

Weights are read once, and again whenever an engine is replaced. A file that was exchanged in
between would answer with other bits, or not at all; this is how that is noticed, at the cost of a
megabyte of each file. The samples are for files whose time says nothing: archives, images of
containers and package managers set one time for all, and other weights of a model have its size.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from quire.common.small_files import open_regular
from quire.errors import CheckpointError

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096
"""Of each file: a megabyte, which takes a millisecond where it was read before. Weights that were
trained further differ almost everywhere, and of a change to a twentieth of a file the samples miss
one in half a million.
"""


class FileState(NamedTuple):
    """What writing to a file changes."""

    size: int
    written_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """Make the state from what the system says of a file."""
        return cls(status.st_size, status.st_mtime_ns)


States = Mapping[str, tuple[int, int, str]]
"""Absolute paths to sizes, times in ns and digests of samples: plain values that can be sent to
another process."""


def samples_of(path: str | Path) -> tuple[int, str]:
    """Return a file's size, and a digest of pieces all over it: the whole of a small one. Raises
    OSError."""
    digest = hashlib.blake2b(digest_size=12)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for place in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))
    return size, digest.hexdigest()


def states_of(paths: Iterable[Path]) -> dict[str, tuple[int, int, str]]:
    """Return the states of files. Raises CheckpointError for one that is not there."""
    states = {}
    for path in paths:
        try:
            size, written_ns = FileState.of(path.stat())
            _, samples = samples_of(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        states[str(lasting_name(path))] = (size, written_ns, samples)
    return states


def lasting_name(path: Path) -> Path:
    """Return a name of a file or folder that depends on no other folder: absolute,
    and not by way of one that may vanish."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def check_unchanged(states: States, *, are_copies: bool = False) -> None:
    """Raise CheckpointError, naming the file, if one is not as it was. Copies of the files, on
    another host, were written at another time."""
    for name, before in states.items():
        try:
            now = FileState.of(os.stat(name))
            _, samples = samples_of(name)
        except OSError as error:
            raise CheckpointError(
                f"{name} cannot be read any more: {error.strerror}; {_ADVICE}"
            ) from None
        if now.size != before[0]:
            raise CheckpointError(
                f"{name} has changed since it was read: {before[0]} bytes then, {now.size} "
                f"now; {_ADVICE}"
            )
        if not are_copies and now.written_ns != before[1]:
            raise CheckpointError(f"{name} has been written to since it was read; {_ADVICE}")
        if samples != before[2]:
            raise CheckpointError(
                f"{name} holds other bytes than when it was read, though its size and time are the "
                f"same; {_ADVICE}"
            )


_ADVICE = "put the file back, or start anew with the files as they are"
