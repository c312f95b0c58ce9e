"""Every byte that is stored is on its tenant's account, whatever happens, and can be given back."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faulty_disk import FaultyDisk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.api.openai import file_store
from quire.server.api.openai.data_folder import DataFolder
from quire.server.api.openai.file_store import FileStore, new_id
from quire.server.api.openai.listing import FileListing, Listing
from quire.server.http.errors import ApiError

EVERYTHING = Listing(limit=100, order="asc")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    made = open_store(tmp_path)
    yield made
    made.close()


def open_store(folder: Path, max_bytes: int = 1 << 40) -> FileStore:
    return FileStore(DataFolder(folder / "data"), max_bytes)


def batch(status: str = "validating", **fields: Any) -> dict[str, Any]:
    return {"status": status, "created_at": 5, **fields}


def on_disk(folder: Path, tenant: str = "a") -> dict[str, int]:
    """Sizes of a tenant's files."""
    found = (folder / "data" / tenant).rglob("*.*")
    return {path.name: path.stat().st_size for path in found if path.is_file()}


def accounted(store: FileStore, tenant: str = "a") -> dict[str, int]:
    return {name: store.ledger.size(tenant, name) or 0 for name in store.ledger.names(tenant)}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add_file", "add_batch", "put", "append", "register", "cut", "delete", "reopen"]
        ),
        st.integers(0, 5),
        st.integers(0, 300),
        st.sampled_from([None, None, 0, 1, 50, 200]),
    ),
    max_size=25,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_the_account_is_what_lies_on_the_disk(
    steps: list[tuple[str, int, int, int | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is done, and whatever of it the disk or a limit refuses."""
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    with monkeypatch.context() as patch:
        disk = FaultyDisk(patch)
        world = _World(tmp_path)
        for what, which, size, room_bytes in steps:
            disk.room_bytes = room_bytes
            try:
                world.do(what, which, size)
            except ApiError as error:
                assert error.status in (400, 404, 507)
            disk.room_bytes = None
            assert accounted(world.store) == on_disk(tmp_path)
            assert world.store.ledger.bytes_of("a") <= 2000 + 6 * 300, (
                "records of what was taken are always kept"
            )
        world.store.close()


class _World:
    """A store, and ids of what was put into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.store = open_store(folder, 2000)
        self._results = [new_id("file") for _ in range(6)]
        self._batches: list[dict[str, Any]] = []
        self._files: list[str] = []
        self.store.unended("a")

    def do(self, what: str, which: int, size: int) -> None:
        store, result = self.store, self._results[which]
        if what == "add_file":
            self._files.append(store.add_file("a", "x", io.BytesIO(b"x" * size))["id"])
        elif what == "add_batch":
            self._batches.append(
                store.add("a", "batch", batch(_output_file_id=result, text="x" * (size // 3)))
            )
        elif what == "put" and self._batches:
            store.put(
                "a",
                "batch",
                self._batches[which % len(self._batches)] | {"status": "x" * (size // 10)},
            )
        elif what == "append" and any(each["_output_file_id"] == result for each in self._batches):
            store.append("a", result, b"y" * size)
        elif what == "register":
            store.register_results("a", result, "out")
        elif what == "cut":
            store.cut("a", result, size // 2)
        elif what == "delete" and self._files:
            store.delete("a", "file", self._files.pop(which % len(self._files)))
        elif what == "reopen":
            store.close()
            self.store = open_store(self._folder, 2000)
            self.store.unended("a")


def test_a_tenants_share_is_taken_before_anything_is_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=1000)
    first = store.add_file("a", "x", io.BytesIO(b"x" * 500))
    for refused in (
        lambda: store.add_file("a", "x", io.BytesIO(b"x" * 500)),
        lambda: store.append("a", new_id("file"), b"x" * 500),
        lambda: store.add("a", "batch", batch(text="x" * 500)),
    ):
        with pytest.raises(ApiError) as caught:
            refused()
        assert caught.value.code == "too_many_bytes" and accounted(store) == on_disk(tmp_path)
    store.add_file("b", "x", io.BytesIO(b"x" * 500))
    store.delete("a", "file", first["id"])
    store.add_file("a", "x", io.BytesIO(b"x" * 500))
    store.close()


def test_what_is_refused_in_part_leaves_nothing(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(monkeypatch)
    for room_bytes in (0, 5):
        disk.room_bytes = room_bytes
        with pytest.raises(ApiError):
            store.append("a", new_id("file"), b"x" * 10)
        assert on_disk(tmp_path) == {} == accounted(store)


def test_a_list_reads_no_record_that_it_does_not_show(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [store.add("a", "batch", batch(number=number))["id"] for number in range(50)]
    num_read = 0
    read = Path.read_bytes

    def counted(path: Path) -> bytes:
        nonlocal num_read
        num_read += 1
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    records, has_more = store.page("a", "batch", Listing(limit=3, after=made[40]))
    assert [record["number"] for record in records] == [39, 38, 37] and has_more and num_read == 3
    with pytest.raises(ApiError) as caught:  # an end in silence would pass for the list's
        store.page("a", "batch", Listing(after=new_id("batch")))
    assert (caught.value.status, caught.value.param) == (400, "after")


def test_newest_first_is_the_order_in_which_they_came_whatever_the_clock_said(
    tmp_path: Path,
) -> None:
    made = []
    for created_at in (100, 100, 5, 7, 90_000, 1):  # a clock that is set, and a restart after each
        store = open_store(tmp_path)
        made.append(store.add("a", "batch", batch(created_at=created_at))["id"])
        records, _ = store.page("a", "batch", EVERYTHING)
        assert [record["id"] for record in records] == made
        store.close()


def test_what_a_server_that_broke_off_left_behind_is_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept, lost = new_id("file"), new_id("file")
    file = store.add_file("a", "x", io.BytesIO(b"abc"))
    store.add("a", "batch", batch("in_progress", _output_file_id=kept))
    store.append("a", kept, b"answered\n")
    store.close()
    files = tmp_path / "data" / "a" / "files"
    (files / f"{lost}.data").write_bytes(b"an upload without a record")
    (files / f"{lost}.0123.tmp").write_bytes(b"a write without an end")
    store = open_store(tmp_path)
    assert store.unended("a") and accounted(store) == on_disk(tmp_path)
    assert sorted(path.name for path in files.iterdir()) == sorted(
        [f"{kept}.data", f"{file['id']}.data", f"{file['id']}.json"]
    )
    store.close()


def test_records_of_an_earlier_version_are_found_and_what_is_none_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(tmp_path).close()
    batches = tmp_path / "data" / "a" / "batches"
    batches.mkdir(parents=True)
    ids = [new_id("batch") for _ in range(3)]
    for number, batch_id in enumerate(ids):
        (batches / f"{batch_id}.json").write_text(
            json.dumps({"id": batch_id, "status": "completed", "created_at": number})
        )
    huge = {"id": new_id("batch"), "status": "completed", "metadata": {"x": "x" * 7_000_000}}
    (batches / f"{huge['id']}.json").write_text(json.dumps(huge))
    (batches / "batch_x.json").write_text("{")
    store = open_store(tmp_path)
    records, has_more = store.page("a", "batch", EVERYTHING)
    assert [record["id"] for record in records] == ids and not has_more
    assert caplog.text.count("is no record, and is left out") == 2
    assert store.ledger.bytes_of("a") > 7_000_000, "it is on the account all the same"
    store.close()


def test_a_deleted_batch_takes_results_that_are_no_files_with_it(
    store: FileStore, tmp_path: Path
) -> None:
    kept, dropped = new_id("file"), new_id("file")
    record = store.add("a", "batch", batch("failed", _output_file_id=kept, _error_file_id=dropped))
    for file_id in (kept, dropped):
        store.append("a", file_id, b"{}\n")
    assert store.register_results("a", kept, "out") and store.register_results("a", kept, "out")
    store.delete("a", "batch", record["id"])
    assert set(on_disk(tmp_path)) == {f"{kept}.data", f"{kept}.json"} == set(accounted(store))
    with pytest.raises(ApiError):
        store.delete("a", "batch", record["id"])
    store.delete("a", "file", kept)
    assert on_disk(tmp_path) == {} == accounted(store)


def test_the_number_of_records_is_bounded_but_for_results(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "MAX_RECORDS", 3)
    made = [store.add_file("a", "x", io.BytesIO(b"x"))["id"] for _ in range(3)]
    for add in (lambda: store.add_file("a", "x", io.BytesIO(b"x")), lambda: store.check_room("a")):
        with pytest.raises(ApiError) as caught:
            add()
        assert caught.value.code == "too_many_records"
    result = new_id("file")
    store.append("a", result, b"x")
    assert store.register_results("a", result, "out")
    listed, _ = store.page("a", "file", FileListing(purpose="batch_output"))
    assert [record["id"] for record in listed] == [result]
    for file_id in made[:2]:
        store.delete("a", "file", file_id)
    store.check_room("a")


def test_a_folder_that_was_replaced_is_looked_at_anew(store: FileStore, tmp_path: Path) -> None:
    file = store.add_file("a", "x", io.BytesIO(b"x"))
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(ApiError) as caught:
        store.get("a", "file", file["id"])
    assert caught.value.status == 507
    (tmp_path / "data").mkdir()
    with pytest.raises(ApiError) as caught:
        store.get("a", "file", file["id"])
    assert caught.value.status == 404 and accounted(store) == {}
    again = store.add_file("a", "x", io.BytesIO(b"x"))
    with store.open_file("a", again["id"]) as content:
        assert content.read() == b"x" and accounted(store) == on_disk(tmp_path)


def test_the_largest_metadata_is_no_record_that_is_too_large() -> None:
    record = batch(metadata={f"{number:x}" + "\1" * 63: "\1" * 512 for number in range(16)})
    assert len(msgspec.json.encode(record)) < file_store.MAX_RECORD_BYTES / 2
