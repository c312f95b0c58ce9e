"""Files that a user names, of any kind: regular ones, pipes, devices. No more is read than a file
of its kind may hold, and a pipe that has no writer is not waited for without end.

Whatever is wrong is an OSError that says so. What belongs to a model is read by
`quire.common.small_files`, from regular files alone.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, TextIO

MAX_LINE_CHARS: Final = 16 << 20
MAX_DATA_BYTES: Final = 1 << 30
"""Of a file with one request on each line, unpacked. The largest published traces have 0.3 GB."""
MAX_TEXT_BYTES: Final = 256 << 20
"""Of a file that is read at once."""
MAX_SETTINGS_BYTES: Final = 4 << 20
"""Of a file of options, keys or costs, or a chat template."""
FIRST_BYTE_S: Final = 10.0
"""For which a pipe is waited for; who has begun to write may take any time."""
_READ_BYTES: Final = 1 << 20


def read_whole(path: str | Path, max_bytes: int) -> bytes:
    """Return what a file holds. Raises OSError, also where that is more than `max_bytes`."""
    with _Bounded(_Source(path), max_bytes) as file:
        return b"".join(iter(lambda: file.read(_READ_BYTES) or b"", b""))


def read_text(path: str | Path, max_bytes: int, *, encoding: str = "utf-8") -> str:
    """Return the same as text, in which every end of a line is a newline. Raises OSError, or
    UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(read_whole(path, max_bytes)), encoding=encoding).read()


@contextmanager
def open_lines(
    path: str | Path, max_bytes: int | None = None, *, encoding: str = "utf-8"
) -> Iterator[Iterator[str]]:
    """Give the lines of a text file, unpacked where its name ends in .gz. Raises OSError, also
    where they amount to more than `max_bytes`, or one is endless."""
    with _Source(path) as source:
        data = gzip.GzipFile(fileobj=source) if str(path).endswith(".gz") else source
        bounded = io.BufferedReader(_Bounded(data, max_bytes))
        with io.TextIOWrapper(bounded, encoding=encoding) as text:
            yield bounded_lines(text)


def bounded_lines(text: TextIO) -> Iterator[str]:
    """Yield the lines of a stream. Raises OSError for one that is longer than any text."""
    while line := bounded_line(text):
        yield line


def bounded_line(text: TextIO) -> str:
    """Return the next line, empty where there is none. Raises OSError for one that is longer than
    any text."""
    line = text.readline(MAX_LINE_CHARS + 1)
    if len(line) > MAX_LINE_CHARS:
        raise OSError(errno.EFBIG, f"a line has more than {MAX_LINE_CHARS >> 20} Mi characters")
    return line


class _Source(io.RawIOBase):
    """A file's bytes as they come."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except ValueError as error:  # a null byte
            raise OSError(errno.EINVAL, str(error)) from None
        mode = os.fstat(self._descriptor).st_mode
        self._is_pipe = stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
        self._has_begun = os.isatty(self._descriptor)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._is_pipe:
                self._wait()
            try:
                count = os.readv(self._descriptor, [buffer])
            except BlockingIOError:
                continue
            self._has_begun = True
            return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(None if self._has_begun else FIRST_BYTE_S * 1e3):
            raise OSError(errno.ETIMEDOUT, f"nothing has come from it for {FIRST_BYTE_S:g} s")


class _Bounded(io.RawIOBase):
    """A stream that ends with an error where it has too much."""

    def __init__(self, data: IO[bytes] | io.RawIOBase | gzip.GzipFile, max_bytes: int | None):
        self._data, self._max_bytes = data, max_bytes
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._data.readinto(buffer) or 0  # type: ignore[union-attr]
        self._num_bytes += count
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            limit = self._max_bytes
            shown = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
            raise OSError(errno.EFBIG, f"it holds more than {shown}, the most that is read")
        return count

    def close(self) -> None:
        self._data.close()
        super().close()
