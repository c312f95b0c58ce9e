"""How batches end where two things happen at once: cancelled while they fail or a server goes,
deleted while others are taken up."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batching import begin, client_of, line, results, wait
from fake_client import FakeClient, Script
from served import until
from servers import serve

from quire.config.api import ApiConfig
from quire.server.api.openai.batch_results import BatchResults
from quire.server.api.openai.file_store import FileStore
from quire.server.quota.tenants import Tenant, key_ring

KEYS = key_ring([(Tenant("a"), ["key-of-a"])])


def config(folder: Path, **options: Any) -> ApiConfig:
    return ApiConfig(**{"data_folder": str(folder), **options})


def lines(number: int) -> str:
    return "\n".join(line(f"r{each}") for each in range(number))


class HeldRegistration:
    """Holds batches that are about to end, before they name their results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()
        register = BatchResults.register

        def held(results: BatchResults) -> dict[str, str]:
            self.is_reached.set()
            assert self.may_go_on.wait(60)
            return register(results)

        monkeypatch.setattr(BatchResults, "register", held)


def test_a_batch_that_is_cancelled_while_it_fails_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldRegistration(monkeypatch)
    with serve(FakeClient(), config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = begin(client, "this is no line")
        until(held.is_reached.is_set)
        assert client.batches.cancel(batch.id).status == "cancelling"
        held.may_go_on.set()
        assert wait(client, batch.id, "cancelled").cancelled_at
        assert deleted(client, batch.id) == 200


def test_a_batch_that_was_cancelled_stays_so_where_the_server_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, folder = HeldRegistration(monkeypatch), tmp_path / "data"
    first, second = FakeClient(Script(begins=False)), FakeClient()
    with serve(first, config(folder), KEYS) as server, client_of(server) as client:
        batch = begin(client, lines(9))
        wait(client, batch.id, "in_progress")
        assert client.batches.cancel(batch.id).status == "cancelling"
        until(held.is_reached.is_set)
        shutil.copytree(folder, tmp_path / "later")  # as it is found after a crash
        held.may_go_on.set()
    with serve(second, config(tmp_path / "later"), KEYS) as server, client_of(server) as client:
        ended = wait(client, batch.id, "cancelled")
        assert ended.cancelled_at
        assert len(results(client, ended.error_file_id)) == 9, "each is named once"
        assert ended.request_counts.failed == 0
    assert second.requests == []


def test_a_batch_that_waits_after_a_restart_shows_what_was_answered_before(tmp_path: Path) -> None:
    gate = threading.Event()
    fake = FakeClient(Script(gate=gate))
    limits = config(tmp_path, max_batch_lines=2, max_running_batches=2)
    with serve(fake, limits, KEYS) as server, client_of(server) as client:
        made = [begin(client, lines(9)).id for _ in range(2)]
        until(lambda: len(fake.streams) == 2)
        gate.set()
        until(lambda: all(num_answered(client, each) for each in made))
        gate.clear()
    before = {
        each: sum(
            len((tmp_path / "a" / "files" / f"{file_id}.data").read_text().splitlines())
            for file_id in [json.loads(record_of(tmp_path, each))["_output_file_id"]]
        )
        for each in made
    }
    stopped = FakeClient(Script(begins=False))
    one_place = config(tmp_path, max_running_batches=1)
    with serve(stopped, one_place, KEYS) as server, client_of(server) as client:
        until(lambda: bool(stopped.streams))
        for batch_id in made:
            assert num_answered(client, batch_id) == before[batch_id]


def num_answered(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def record_of(folder: Path, batch_id: str) -> bytes:
    return (folder / "a" / "batches" / f"{batch_id}.json").read_bytes()


def test_lines_that_time_ran_out_for_are_named_among_the_errors(tmp_path: Path) -> None:
    with (
        serve(FakeClient(Script(begins=False)), config(tmp_path), KEYS) as server,
        client_of(server) as client,
    ):
        batch, no_input = (begin(client, lines(600)) for _ in range(2))
        for each in (batch, no_input):
            wait(client, each.id, "in_progress")
    # Not before the server has stopped: it may not have read all lines yet, and would fail the batch.
    (tmp_path / "a" / "files" / f"{no_input.input_file_id}.data").unlink()
    for each in (batch, no_input):
        path = tmp_path / "a" / "batches" / f"{each.id}.json"
        record = json.loads(path.read_bytes())
        path.write_text(json.dumps(record | {"expires_at": 5}))
        for kind in ("output", "error"):
            answered = {"custom_id": f"r{('output', 'error').index(kind)}", "response": {}}
            data = tmp_path / "a" / "files" / f"{record[f'_{kind}_file_id']}.data"
            data.write_text(json.dumps(answered) + "\n")
    with serve(FakeClient(), config(tmp_path), KEYS) as server, client_of(server) as client:
        ended = wait(client, batch.id, "expired")
        counts = ended.request_counts
        assert (counts.total, counts.completed, counts.failed) == (600, 1, 599)
        assert set(results(client, ended.output_file_id)) == {"r0"}
        errors = results(client, ended.error_file_id)
        assert set(errors) == {f"r{number}" for number in range(1, 600)}
        assert errors["r599"]["error"]["code"] == "batch_expired"
        assert errors["r599"]["response"] is None and errors["r1"]["response"] == {}
        kept = wait(client, no_input.id, "expired")
        assert set(results(client, kept.error_file_id)) == {"r1"}


def test_a_batch_that_is_deleted_while_a_server_starts_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = FakeClient(Script(begins=False))
    with serve(stuck, config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = begin(client, lines(3))
        wait(client, batch.id, "in_progress")
    unended = FileStore.unended
    monkeypatch.setattr(FileStore, "unended", lambda *args: ["batch_" + "0" * 24, *unended(*args)])
    with serve(FakeClient(), config(tmp_path), KEYS) as server, client_of(server) as client:
        ended = wait(client, batch.id, "completed")
        assert len(results(client, ended.output_file_id)) == 3


def test_a_batch_that_shows_its_end_can_be_deleted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held, may_go_on, put = threading.Event(), threading.Event(), FileStore.put

    def slow_put(store: FileStore, tenant: str, kind: Any, record: dict[str, Any]) -> None:
        if record["status"] == "completed":
            is_held.set()
            assert may_go_on.wait(60)
        put(store, tenant, kind, record)

    monkeypatch.setattr(FileStore, "put", slow_put)
    with serve(FakeClient(), config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = begin(client, lines(1))
        wait(client, batch.id, "completed")
        until(is_held.is_set)
        answers: list[int] = []
        deleting = threading.Thread(target=lambda: answers.append(deleted(client, batch.id)))
        deleting.start()
        may_go_on.set()
        deleting.join()
        assert answers == [200]
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve(batch.id)


def deleted(client: openai.OpenAI, batch_id: str) -> int:
    """The status of the answer."""
    with contextlib.suppress(openai.ConflictError):
        return client.delete(f"/batches/{batch_id}", cast_to=httpx.Response).status_code
    return 409


def test_an_input_that_is_not_there_is_named_by_its_field(tmp_path: Path) -> None:
    with (
        serve(FakeClient(), config(tmp_path), KEYS) as server,
        client_of(server) as client,
        pytest.raises(openai.NotFoundError) as caught,
    ):
        client.batches.create(
            input_file_id="file-" + "0" * 24,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
    assert caught.value.param == "input_file_id"


def test_wishes_for_an_end_of_files_are_named_as_ignored(tmp_path: Path) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    with serve(FakeClient(), config(tmp_path), KEYS) as server, client_of(server) as client:
        made = client.files.with_raw_response.create(
            file=("in.jsonl", lines(1).encode()), purpose="batch", expires_after=expiry
        )
        ignored = made.headers["x-quire-ignored-fields"]
        assert ignored == "expires_after[anchor], expires_after[seconds]"
        begun = client.batches.with_raw_response.create(
            input_file_id=made.parse().id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            output_expires_after=expiry,
        )
        assert begun.headers["x-quire-ignored-fields"] == "output_expires_after"
    strict = config(tmp_path, strict_fields=True)
    with (
        serve(FakeClient(), strict, KEYS) as server,
        client_of(server) as client,
        pytest.raises(openai.BadRequestError, match="kept until they are deleted"),
    ):
        client.files.create(file=b"x", purpose="batch", expires_after=expiry)
