"""Reading small untrusted files, such as a model's JSON: bounded, and with one kind of error; and
writing them, whole or not at all.

Owns the bounds: bytes, how many values a document holds (a byte of `[[],[],...` becomes some forty
in memory), and whether its texts are Unicode at all, which JSON's escapes do not promise. Whatever
is wrong with a file is a CheckpointError that names it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Final

from quire.errors import CheckpointError

_MAX_VALUES: Final = 4 << 20
"""The index of the largest published checkpoint has 100,000 tensors."""
_MAX_REASON_CHARS: Final = 200
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


def is_file(path: Path) -> bool:
    """Return whether there is a regular file of this name.
    Raises CheckpointError where the system does not say."""
    status = _status(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: Path) -> bool:
    """Return whether there is a folder of this name. Raises CheckpointError
    where the system does not say."""
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def exists(path: Path) -> bool:
    """Return whether anything has this name, to be read or refused: an optional file that is
    there as a folder is not absent. Raises CheckpointError where the system does not say."""
    return _status(path) is not None


def open_regular(path: str | Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file to be read; a pipe is not waited for. Raises OSError."""
    # a name with a null byte: ValueError
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(descriptor, "rb", buffering)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return what a regular file holds; never more than `max_bytes` are read. Raises
    CheckpointError."""
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{_shown(path)} cannot be read: {_reason(error)}") from None
    if len(data) > max_bytes:
        raise CheckpointError(
            f"{path} is larger than {max_bytes} bytes, which no file of its kind should be"
        )
    return data


def read_text(path: Path, max_bytes: int) -> str:
    """Return the same as text. Raises CheckpointError."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises CheckpointError."""
    return parse_object(read_bytes(path, max_bytes), str(path))


def read_optional_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the same, empty where nothing has this name. Raises CheckpointError also for what is
    there and no regular file."""
    return read_object(path, max_bytes) if exists(path) else {}


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """Return the object that a JSON document holds; `name` is what errors call it.
    Raises CheckpointError."""
    num_values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if num_values > _MAX_VALUES:
        raise CheckpointError(
            f"{name} holds some {num_values} values; at most {_MAX_VALUES} are read"
        )
    try:
        value = json.loads(data)
        if _SURROGATE.search(data) is not None:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{name} holds text that is not valid Unicode (a lone surrogate)"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} must hold a JSON object, not {type(value).__name__}")
    return value


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise CheckpointError(f"{_shown(path)} cannot be looked for: {_reason(error)}") from None
    except ValueError:  # a null byte
        return None


def _shown(path: Path) -> str:
    """Return the name, or its end where it is longer than any that a system would take."""
    text = str(path)
    return text if len(text) <= _MAX_REASON_CHARS else f"...{text[-_MAX_REASON_CHARS:]}"


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return (strerror or str(error) or type(error).__name__)[:_MAX_REASON_CHARS]


def write_whole(path: Path, text: str) -> None:
    """Write a file for its owner alone, under another name first: a reader sees a whole one or
    none, and nothing is left of one that cannot be completed. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
