"""A disk that fills up, or takes nothing, under a data folder:
bytes reach it as far as it has room, as with a real one."""

from __future__ import annotations

import errno
import os
from typing import IO

import pytest

from quire.server.api.openai.data_folder import DataFolder


class FaultyDisk:
    """In place of what every write goes through, while the monkeypatch lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room_bytes: int | None = None
        """None: there is room for everything."""
        self.number = errno.ENOSPC
        """What the system says where there is no room."""
        self.num_refused = 0
        write = DataFolder._write

        def write_as_far_as_it_goes(folder: DataFolder, target: IO[bytes], data: bytes) -> None:
            if self.room_bytes is None:
                write(folder, target, data)
                return
            taken = data[: self.room_bytes]
            self.room_bytes -= len(taken)
            write(folder, target, taken)
            if len(taken) < len(data):
                self.num_refused += 1
                raise OSError(self.number, os.strerror(self.number), str(target.name))

        monkeypatch.setattr(DataFolder, "_write", write_as_far_as_it_goes)
