"""Where a command's results go: standard output or a file, with write errors as one clear line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from quire.errors import QuireError


class OutputError(QuireError):
    """Results cannot be written: no permission, a full disk."""


class OutputFile:
    """Writes and flushes text; a failure raises OutputError,
    a reader that went away BrokenPipeError."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, text: str) -> None:
        """Write at once, so that readers see it and a full disk is noticed here."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"{self._name} cannot be written: {error.strerror}") from None


def check_output(path: str | None) -> None:
    """Raise OutputError where a file could not be written after a long run; what it holds stays."""
    if path is None or Path(path).is_fifo():  # whose reader would see its end
        return
    try:
        open(path, "ab").close()
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def open_output(path: str | None) -> Iterator[OutputFile]:
    """Open the file at `path`, written anew, or standard output."""
    if path is None:
        yield OutputFile(sys.stdout, "the output")
        return
    try:
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed below, where errors are expected)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    try:
        yield OutputFile(stream, path)
    finally:
        with contextlib.suppress(OSError):  # what could not be flushed has been reported by write()
            stream.close()
