"""A program's output that takes a few words and no more until it is read:
so the program cannot end before a test lets it."""

from __future__ import annotations

import array
import fcntl
import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from served import until

ROOM = 64
"""Bytes that it takes."""


@dataclass(slots=True)
class StuckOutput:
    """A pipe that is all but full."""

    write_end: int
    """For the program; to be closed here once the program has it."""
    reader: TextIO
    num_filled: int

    def await_words(self) -> None:
        """Until the program has written something."""
        until(lambda: self._num_bytes() > self.num_filled + 4)

    def _num_bytes(self) -> int:
        count = array.array("i", [0])
        fcntl.ioctl(self.reader, termios.FIONREAD, count)
        return count[0]


@contextmanager
def stuck_output() -> Iterator[StuckOutput]:
    """Such an output; what it reads first is its filling, which is no words."""
    read_end, write_end = os.pipe()
    num_filled = fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096) - ROOM
    os.write(write_end, b"-" * num_filled)
    with os.fdopen(read_end) as reader:
        yield StuckOutput(write_end, reader, num_filled)
