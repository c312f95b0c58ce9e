"""Files and batches with the official client: run, resumed after a restart, cancelled, each tenant's own."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_client import FakeClient, Script
from faulty_disk import FaultyDisk
from served import until
from servers import RunningServer, serve

from quire.config.api import ApiConfig
from quire.server.errors import ApiError
from quire.server.openai.data_folder import DataFolder
from quire.server.openai.file_store import FileStore
from quire.server.tenants import Tenant, key_ring

KEYS = key_ring([(Tenant("a"), ["key-of-a"]), (Tenant("b"), ["key-of-b"])])


def line(name: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    """One request of an input file."""
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": chat})


def config(folder: Path) -> ApiConfig:
    return ApiConfig(data_folder=str(folder), max_file_bytes=100_000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with serve(FakeClient(), config(tmp_path), KEYS) as running:
        yield running


def client_of(server: RunningServer, key: str = "key-of-a") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=key, max_retries=0)


def begin(client: openai.OpenAI, text: str, endpoint: Any = "/v1/chat/completions") -> Any:
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def wait(client: openai.OpenAI, batch_id: str, *wanted: str) -> Any:
    batch: Any = None

    def is_there() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch_id)
        return batch.status in wanted

    until(is_there)
    return batch


def results(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    """Result lines by their `custom_id`."""
    entries = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len(entries)
    return {entry["custom_id"]: entry for entry in entries}


def test_files(server: RunningServer) -> None:
    with client_of(server) as client, client_of(server, "key-of-b") as other:
        file = client.files.create(file=("../../a b.jsonl", b"{}\n"), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("a b.jsonl", 3, "batch")
        assert [each.id for each in client.files.list()] == [file.id]
        assert client.files.content(file.id).content == b"{}\n"
        assert list(other.files.list()) == []
        for stranger, file_id in ((other, file.id), (client, "file-" + "0" * 24), (client, "..%2f..")):
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_said_and_leaves_nothing_behind(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk(monkeypatch)
    disk.number = number
    with client_of(server) as client:
        for room_bytes in (0, 1, 150):  # nothing, a part of the content, all of it and a part of its record
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


def stored_in(folder: Path) -> list[Path]:
    """What lies in a data folder."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def test_every_endpoint_that_generates_can_be_run_in_a_batch(server: RunningServer) -> None:
    with client_of(server) as client:
        for url, body in (
            ("/v1/completions", {"prompt": [5], "messages": None}),
            ("/v1/responses", {"input": "x"}),
        ):
            lines = [
                line("good", url, **body),
                line("bad", url, **body, temperature=9),
                line("stream", url, **body, stream=True),
            ]
            batch = wait(client, begin(client, "\n".join(lines), url).id, "completed")
            assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
            answer = results(client, batch.output_file_id)["good"]["response"]["body"]
            assert {entry["response"]["status_code"] for entry in results(client, batch.error_file_id).values()} == {400}
        assert answer["object"] == "response" and answer["output"][0]["content"][0]["text"] == "one two three"
        with pytest.raises(openai.NotFoundError):  # a batch's answers are in its file, and take nothing else's room
            client.responses.retrieve(answer["id"])


def test_a_tenants_files_are_bounded_together(tmp_path: Path) -> None:
    limits = ApiConfig(data_folder=str(tmp_path), max_stored_file_bytes=1000)
    with serve(FakeClient(), limits, KEYS) as server, client_of(server) as client, client_of(server, "key-of-b") as other:
        first = client.files.create(file=b"x" * 600, purpose="batch")
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.create(file=b"x" * 600, purpose="batch")
        assert caught.value.code == "too_many_bytes"
        other.files.create(file=b"x" * 600, purpose="batch")
        client.files.delete(first.id)
        client.files.create(file=b"x" * 600, purpose="batch")


def test_a_batch_is_run(server: RunningServer) -> None:
    with client_of(server) as client:
        text = "\n".join([line("one"), line("two", n=2), "", line("bad", temperature=9), line("stream", stream=True)])
        batch = wait(client, begin(client, text).id, "completed")
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
        good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert set(good) == {"one", "two"} and set(bad) == {"bad", "stream"}
        assert good["one"]["response"]["body"]["choices"][0]["message"]["content"] == "one two three"
        assert len(good["two"]["response"]["body"]["choices"]) == 2
        assert bad["bad"]["response"]["status_code"] == 400
        assert bad["bad"]["response"]["body"]["error"]["param"] == "temperature"
        assert [each.id for each in client.batches.list()] == [batch.id]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_file"),
        ("{", "invalid_json_line"),
        (line("a") + "\n" + line("a"), "duplicate_custom_id"),
        (line("a", url="/v1/completions"), "mismatched_url"),
    ],
)
def test_an_input_that_makes_no_sense_fails_the_batch(server: RunningServer, text: str, code: str) -> None:
    with client_of(server) as client:
        batch = wait(client, begin(client, text).id, "failed")
        assert batch.errors.data[0].code == code


def test_a_batch_goes_on_after_a_restart_without_repeating_a_line(tmp_path: Path) -> None:
    first = FakeClient(Script(pieces=("x",), begins=False))
    with serve(first, config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = begin(client, "\n".join(line(f"r{number}") for number in range(6)))
        wait(client, batch.id, "in_progress")
    record = json.loads((tmp_path / "a" / "batches" / f"{batch.id}.json").read_bytes())
    output = tmp_path / "a" / "files" / f"{record['_output_file_id']}.data"
    answered = {"id": "x", "custom_id": "r0", "response": {"status_code": 200, "body": "from before"}, "error": None}
    output.write_text(json.dumps(answered) + "\n" + '{"custom_id": "r1", "resp')  # and a line that was not finished
    second = FakeClient()
    with serve(second, config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = wait(client, batch.id, "completed")
        good = results(client, batch.output_file_id)
    assert set(good) == {f"r{number}" for number in range(6)} and batch.request_counts.completed == 6
    assert good["r0"]["response"]["body"] == "from before" and len(second.requests) == 5


def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    fake = FakeClient(Script(begins=False))
    with serve(fake, config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = begin(client, "\n".join(line(f"r{number}") for number in range(50)))
        wait(client, batch.id, "in_progress")
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert wait(client, batch.id, "cancelled").cancelled_at
        assert fake.streams == []


def test_without_a_folder_both_are_off() -> None:
    with serve(FakeClient()) as server:
        answer = httpx.get(f"{server.v1}/files")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "files_off")


def test_t17_nothing_outside_the_folder_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = DataFolder(tmp_path / "data")
    store = FileStore(folder)
    for name in ("../secret", "/etc/passwd", "file-../../secret", "file-" + "0" * 23 + "\n", "file-" + "\uff10" * 24, ""):
        with pytest.raises(ApiError):
            store.get("a", "file", name)
        with pytest.raises(ApiError):
            store.open_content("a", name)
    folder.close()
