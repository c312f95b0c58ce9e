"""Names of files and folders as options have them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

_MAX_PATH_BYTES, _MAX_PART_BYTES = 4095, 255
"""Linux and macOS take no longer ones."""
_MAX_SHOWN_CHARS = 80


def checked_path(option: str, value: Any) -> str:
    """Return a path as text. Raises ConfigError for what can be none on any system."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"{option}={value!r:.{_MAX_SHOWN_CHARS}} must be text: the name of a file or folder"
        )
    if not is_possible(text):
        raise ConfigError(
            f"{option}={text[:_MAX_SHOWN_CHARS]!r}: no file has such a name, or so long a one; "
            "give another"
        )
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{option}={text[:_MAX_SHOWN_CHARS]!r}: the home of this user is not known; give the "
            "whole name"
        ) from None
    return text


def expanded_path(option: str, value: Any) -> str:
    """Return the same with the home folder in place of "~", which no shell puts there behind an
    equals sign. Raises ConfigError."""
    return str(Path(checked_path(option, value)).expanduser())


def is_possible(text: str) -> bool:
    """Whether a file or folder could have this name."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:  # half a character
        return False
    longest = max(map(len, name.split(os.sep.encode())))
    return b"\0" not in name and len(name) <= _MAX_PATH_BYTES and longest <= _MAX_PART_BYTES
