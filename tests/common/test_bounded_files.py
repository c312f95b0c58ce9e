"""Files of users: any kind is read, none without end."""

from __future__ import annotations

import gzip
import io
import os
import threading
from pathlib import Path

import pytest

from quire.common import bounded_files
from quire.common.bounded_files import bounded_lines, open_lines, read_text, read_whole


def _lines(path: str | Path, max_bytes: int | None = None) -> list[str]:
    with open_lines(path, max_bytes) as lines:
        return list(lines)


def test_what_fits_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\nfour")
    assert read_whole(path, 22) == path.read_bytes()
    assert read_text(path, 22, encoding="utf-8-sig") == "one\ntwo\nthree\nfour"
    assert read_text(path, 22, encoding="utf-8-sig") == path.read_text("utf-8-sig")
    path.write_text("a\nb\r\n\nc")
    assert _lines(path) == ["a\n", "b\n", "\n", "c"]
    packed = tmp_path / "text.gz"
    packed.write_bytes(gzip.compress(b"a\nb"))
    assert _lines(packed, 3) == ["a\n", "b"]
    assert read_whole("/dev/null", 1) == b"" and _lines("/dev/null") == []
    large = os.urandom(3 << 20)
    path.write_bytes(large)
    assert read_whole(path, 3 << 20) == large


def test_what_has_no_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="it holds more than 4 MiB"):
        read_whole("/dev/zero", 4 << 20)
    with pytest.raises(OSError, match="it holds more than 7 bytes"):
        read_whole("/dev/zero", 7)
    monkeypatch.setattr(bounded_files, "MAX_LINE_CHARS", 1 << 20)
    with pytest.raises(OSError, match="a line has more than 1 Mi characters"):
        _lines("/dev/zero")
    with pytest.raises(OSError, match="a line has more than 1 Mi characters"):
        list(bounded_lines(io.StringIO("a\n" + "b" * (1 << 20) + "\n")))
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b"a\n" * (1 << 20)))
    with pytest.raises(OSError, match="it holds more than 1 MiB"):
        _lines(bomb, 1 << 20)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", "a\0b"):
        with pytest.raises(OSError):
            read_whole(path, 10)
        with pytest.raises(OSError):
            _lines(path)


def test_a_pipe_is_waited_for_until_its_writer_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    began = threading.Event()
    gate = threading.Event()

    def write() -> None:
        with path.open("w") as file:
            file.write("one\n")
            file.flush()
            began.set()
            gate.wait(60)
            file.write("two\n")

    writer = threading.Thread(target=write)
    writer.start()
    with open_lines(path) as lines:
        assert began.wait(60)
        monkeypatch.setattr(bounded_files, "FIRST_BYTE_S", 0.0)  # it has begun: no deadline now
        threading.Timer(0.2, gate.set).start()
        assert list(lines) == ["one\n", "two\n"]
    writer.join()
    with pytest.raises(OSError, match="nothing has come from it"):
        read_whole(path, 10)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a\nb\n")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with open_lines(path) as lines:
            next(lines)
        read_whole(path, 10)
        with pytest.raises(OSError):
            read_whole("/dev/zero", 10)
    assert len(os.listdir("/proc/self/fd")) == before
