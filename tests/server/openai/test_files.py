"""Files and batches with the official client: run, resumed after a restart, cancelled,
each tenant's own."""

from __future__ import annotations

import errno
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from batching import client_of
from fake_client import FakeClient
from faulty_disk import FaultyDisk
from served import Served, until
from servers import RunningServer, serve

from quire.config.api import ApiConfig
from quire.server.api.openai.data_folder import DataFolder
from quire.server.api.openai.file_store import FileStore
from quire.server.http.errors import ApiError
from quire.server.quota.tenants import Tenant, key_ring

KEYS = key_ring([(Tenant("a"), ["key-of-a"]), (Tenant("b"), ["key-of-b"])])


def config(folder: Path) -> ApiConfig:
    return ApiConfig(data_folder=str(folder), max_file_bytes=100_000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with serve(FakeClient(), config(tmp_path), KEYS) as running:
        yield running


def test_files(server: RunningServer) -> None:
    with client_of(server) as client, client_of(server, "key-of-b") as other:
        file = client.files.create(file=("../../a b.jsonl", b"{}\n"), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("a b.jsonl", 3, "batch")
        assert [each.id for each in client.files.list()] == [file.id]
        assert client.files.content(file.id).content == b"{}\n"
        assert list(other.files.list()) == []
        for stranger, file_id in (
            (other, file.id),
            (client, "file-" + "0" * 24),
            (client, "..%2f.."),
        ):
            with pytest.raises(openai.NotFoundError):
                stranger.files.content(file_id)
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        with pytest.raises(openai.BadRequestError):
            client.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=b"x" * 300_000, purpose="batch")
        assert caught.value.status_code == 413


@pytest.mark.parametrize(
    ("charset", "status"),
    [("utf-8", 200), ("no-such", 200), ("unicode_escape", 400), ("punycode", 400)],
)
def test_a_form_says_itself_how_it_is_written(
    server: RunningServer, charset: str, status: int
) -> None:
    body = (
        '--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B\r\n'
        'Content-Disposition: form-data; name="file"; filename="a\\ud800"\r\n\r\nx\r\n--B--\r\n'
    )
    answer = httpx.post(
        f"{server.v1}/files",
        content=body,
        headers={
            "content-type": f"Multipart/Form-Data; boundary=B; charset={charset}",
            "authorization": "Bearer key-of-a",
        },
    )
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]["code"] == "invalid_form"


def test_a_list_is_walked_while_it_is_deleted(server: RunningServer) -> None:
    with client_of(server) as client:
        made = {client.files.create(file=b"x", purpose="batch").id for _ in range(7)}
        deleted = set()
        for file in client.files.list(limit=2):
            client.files.delete(file.id)
            deleted.add(file.id)
        assert deleted >= made and not list(client.files.list())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_said_and_leaves_nothing_behind(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FaultyDisk(monkeypatch)
    disk.number = number
    with client_of(server) as client:
        # nothing, a part of the content, all of it and a part of its record
        for room_bytes in (0, 1, 150):
            disk.room_bytes = room_bytes
            with pytest.raises(openai.InternalServerError) as caught:
                client.files.create(file=b"x" * 100, purpose="batch")
            assert caught.value.status_code == 507 and caught.value.code == "storage_failed"
            assert caught.value.response.headers["x-should-retry"] == "false"
            assert str(tmp_path) not in caught.value.response.text + caplog.text
            assert stored_in(tmp_path) == [] and list(client.files.list()) == []
        disk.room_bytes = None
        file = client.files.create(file=b"x", purpose="batch")
        for lost in tmp_path.rglob("*.data"):
            lost.unlink()
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)
        assert client.files.delete(file.id).deleted


@pytest.mark.slow
def test_what_the_system_lets_nobody_write_is_answered_and_survived(served: Served) -> None:
    """As above, where it is the kernel that refuses, in the middle of a file."""
    pid = served.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=served.headers["x-api-key"], max_retries=0
    ) as client:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with pytest.raises(openai.InternalServerError) as caught:
                client.files.create(file=b"x" * 50_000, purpose="batch")
            assert caught.value.status_code == 507
            client.files.delete(client.files.create(file=b"x" * 10_000, purpose="batch").id)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        client.files.delete(client.files.create(file=b"x" * 50_000, purpose="batch").id)
        assert list(client.files.list()) == []
        assert served.get("/livez").status_code == 200


@pytest.mark.slow
def test_uploads_on_their_way_are_bounded(tmp_path: Path) -> None:
    """Each waits in a temporary file until it is complete."""
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\nx-api-key: %b\r\ncontent-length: 99999\r\n" \
           b"content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"  # fmt: skip
    with serve(FakeClient(), config(tmp_path), KEYS) as server:
        slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
        for connection in slow:
            connection.sendall(head % b"key-of-a")
        refused, _, _ = select.select(slow, [], [], 60)
        assert len(refused) == 1 and b"too_many_uploads" in refused[0].recv(10_000)
        with client_of(server, "key-of-b") as client:
            client.files.create(file=b"x", purpose="batch")
        for connection in slow:
            connection.close()
        with client_of(server) as client:

            def is_taken() -> bool:
                try:
                    return bool(client.files.create(file=b"x", purpose="batch"))
                except openai.RateLimitError:
                    return False

            until(is_taken)


def stored_in(folder: Path) -> list[Path]:
    """What lies in a data folder."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def test_a_tenants_files_are_bounded_together(tmp_path: Path) -> None:
    limits = ApiConfig(data_folder=str(tmp_path), max_stored_file_bytes=1000)
    with (
        serve(FakeClient(), limits, KEYS) as server,
        client_of(server) as client,
        client_of(server, "key-of-b") as other,
    ):
        first = client.files.create(file=b"x" * 600, purpose="batch")
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.create(file=b"x" * 600, purpose="batch")
        assert caught.value.code == "too_many_bytes"
        other.files.create(file=b"x" * 600, purpose="batch")
        client.files.delete(first.id)
        client.files.create(file=b"x" * 600, purpose="batch")


def test_without_a_folder_both_are_off() -> None:
    with serve(FakeClient()) as server:
        answer = httpx.get(f"{server.v1}/files")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "files_off")


def test_t17_nothing_outside_the_folder_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = DataFolder(tmp_path / "data")
    store = FileStore(folder)
    for name in (
        "../secret",
        "/etc/passwd",
        "file-../../secret",
        "file-" + "0" * 23 + "\n",
        "file-" + "\uff10" * 24,
        "",
    ):
        with pytest.raises(ApiError):
            store.get("a", "file", name)
        with pytest.raises(ApiError):
            store.open_content("a", name)
    folder.close()
