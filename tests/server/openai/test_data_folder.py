"""One server has a folder, notices when it is another one,
and what a disk takes in part is taken back."""

from __future__ import annotations

import errno
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from quire.errors import ConfigError
from quire.server.api.openai.data_folder import DataFolder
from quire.server.http.errors import ApiError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    made = DataFolder(tmp_path / "data")
    yield made
    made.close()


def test_two_servers_do_not_share_a_folder(folder: DataFolder) -> None:
    with pytest.raises(ConfigError, match="is used by another server"):
        DataFolder(folder.root)
    folder.close()
    DataFolder(folder.root).close()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"data_folder=.*file. cannot be used: .*; choose another"
    ):
        DataFolder(tmp_path / "file")


def test_a_folder_that_is_gone_or_another_is_noticed(folder: DataFolder) -> None:
    assert not folder.is_another()
    folder.root.rename(folder.root.with_name("moved"))
    with pytest.raises(ApiError) as caught:
        folder.is_another()
    assert (caught.value.status, caught.value.code) == (507, "storage_failed")
    with pytest.raises(ApiError):
        folder.folder("a", "files")
    assert not folder.root.exists(), "it may be where a disk is to be mounted"
    folder.root.mkdir()
    assert folder.is_another() and not folder.is_another()
    shutil.rmtree(folder.root)
    folder.root.mkdir()
    assert folder.is_another(), "also where the new one has the number of the old one"


@pytest.mark.parametrize("room_bytes", [0, 1, 9])
def test_what_is_written_in_part_is_taken_back(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    path, disk = folder.root / "x", FaultyDisk(monkeypatch)
    folder.replace(path, b"before")
    writes: tuple[Callable[[], None], ...] = (
        lambda: folder.replace(path, b"x" * 10),
        lambda: folder.append(path, b"x" * 10, 6),
        lambda: folder.copy(path, io.BytesIO(b"x" * 10)),
    )
    for write in writes:
        disk.room_bytes = room_bytes
        with pytest.raises(ApiError) as caught:
            write()
        assert caught.value.status == 507 and caught.value.headers["x-should-retry"] == "false"
        assert path.read_bytes() == b"before"
        assert sorted(each.name for each in folder.root.iterdir()) == [".lock", "x"]
    disk.room_bytes = None
    writes[1]()
    assert path.read_bytes() == b"before" + b"x" * 10


def test_what_lies_behind_the_known_end_is_written_over_and_what_is_missing_is_noticed(
    folder: DataFolder,
) -> None:
    path = folder.root / "x"
    path.write_bytes(b"one\ntw")
    folder.append(path, b"two\n", 4)
    assert path.read_bytes() == b"one\ntwo\n"
    path.write_bytes(b"on")
    with pytest.raises(ApiError) as caught:
        folder.append(path, b"three\n", 8)
    assert caught.value.status == 507 and path.read_bytes() == b"on"
    folder.truncate(path, 1)
    assert path.read_bytes() == b"o"


def test_where_the_file_system_has_no_locks_the_operator_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", fail)
    DataFolder(tmp_path / "data").close()
    assert "has no locks" in caplog.text
