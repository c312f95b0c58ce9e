"""Batches with the official client: run, resumed, cancelled, deleted; bounded;
whatever clocks and disks do."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batching import begin, client_of, line, results, wait
from fake_client import FakeClient, Script
from faulty_disk import FaultyDisk
from served import resident_bytes, until
from servers import RunningServer, serve

from quire.config.api import ApiConfig
from quire.errors import UnavailableError
from quire.server.api.openai import batch_lines, batches
from quire.server.api.openai.data_folder import DataFolder
from quire.server.quota.tenants import Tenant, key_ring

KEYS = key_ring([(Tenant("a"), ["key-of-a"]), (Tenant("b"), ["key-of-b"])])


def config(folder: Path, **options: Any) -> ApiConfig:
    return ApiConfig(**{"data_folder": str(folder), "max_file_bytes": 100_000, **options})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with serve(FakeClient(), config(tmp_path), KEYS) as running:
        yield running


def lines(number: int) -> str:
    return "\n".join(line(f"r{each}") for each in range(number))


def statuses(client: openai.OpenAI) -> list[str]:
    """Of all batches, oldest first."""
    return [str(each.status) for each in client.batches.list()][::-1]


def counts_of(client: openai.OpenAI, batch_id: str) -> Any:
    """How many requests of a batch were answered."""
    return client.batches.retrieve(batch_id).request_counts


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
            assert {
                entry["response"]["status_code"]
                for entry in results(client, batch.error_file_id).values()
            } == {400}
        assert (
            answer["object"] == "response"
            and answer["output"][0]["content"][0]["text"] == "one two three"
        )
        # a batch's answers are in its file, and take nothing else's room
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer["id"])


def test_a_batch_is_run(server: RunningServer) -> None:
    with client_of(server) as client:
        text = "\n".join(
            [
                line("one"),
                line("two", n=2),
                "",
                line("bad", temperature=9),
                line("stream", stream=True),
            ]
        )
        batch = wait(client, begin(client, text).id, "completed")
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
        good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert set(good) == {"one", "two"} and set(bad) == {"bad", "stream"}
        assert (
            good["one"]["response"]["body"]["choices"][0]["message"]["content"] == "one two three"
        )
        assert len(good["two"]["response"]["body"]["choices"]) == 2
        assert bad["bad"]["response"]["status_code"] == 400
        assert bad["bad"]["response"]["body"]["error"]["param"] == "temperature"
        assert [each.id for each in client.batches.list()] == [batch.id]


def test_fields_of_a_line_without_effect_are_named(server: RunningServer) -> None:
    odd: dict[str, Any] = {"colour": "red", "a b": 1}
    with client_of(server) as client:
        text = "\n".join([line("all"), line("some", **odd)])
        batch = wait(client, begin(client, text).id, "completed")
        good = results(client, batch.output_file_id)
        assert good["some"]["response"]["ignored_fields"] == "colour, a%20b"
        assert "ignored_fields" not in good["all"]["response"]


def test_unknown_fields_of_a_line_are_refused_where_those_of_a_request_are(tmp_path: Path) -> None:
    with (
        serve(FakeClient(), config(tmp_path, strict_fields=True), KEYS) as server,
        client_of(server) as client,
    ):
        text = "\n".join([line("all"), line("some", colour="red")])
        batch = wait(client, begin(client, text).id, "completed")
        assert set(results(client, batch.output_file_id)) == {"all"}
        error = results(client, batch.error_file_id)["some"]["response"]["body"]["error"]
        assert (error["param"], error["code"]) == ("colour", "unknown_parameter")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_file"),
        ("{", "invalid_json_line"),
        (line("a") + "\n" + line("a"), "duplicate_custom_id"),
        (line("a", url="/v1/completions"), "mismatched_url"),
    ],
)
def test_an_input_that_makes_no_sense_fails_the_batch(
    server: RunningServer, text: str, code: str
) -> None:
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
    answered = {
        "id": "x",
        "custom_id": "r0",
        "response": {"status_code": 200, "body": "from before"},
        "error": None,
    }
    # and a line that was not finished
    output.write_text(json.dumps(answered) + "\n" + '{"custom_id": "r1", "resp')
    second = FakeClient()
    with serve(second, config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = wait(client, batch.id, "completed")
        good = results(client, batch.output_file_id)
    assert (
        set(good) == {f"r{number}" for number in range(6)} and batch.request_counts.completed == 6
    )
    assert good["r0"]["response"]["body"] == "from before" and len(second.requests) == 5


def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    fake = FakeClient(Script(begins=False))
    with serve(fake, config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = begin(client, "\n".join(line(f"r{number}") for number in range(50)))
        wait(client, batch.id, "in_progress")
        assert client.batches.cancel(batch.id).status == "cancelling"
        ended = wait(client, batch.id, "cancelled")
        assert ended.cancelled_at and ended.output_file_id is None
        assert fake.streams == []
        errors = results(client, ended.error_file_id)
        assert set(errors) == {f"r{number}" for number in range(50)}
        assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
        assert {each["response"] for each in errors.values()} == {None}
        counts = ended.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (50, 0, 0), "as OpenAI counts"


def test_no_line_is_sent_while_the_engine_sleeps(tmp_path: Path) -> None:
    fake = FakeClient(state="sleeping")
    with serve(fake, config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = begin(client, "\n".join(line(f"r{number}") for number in range(5)))
        wait(client, batch.id, "in_progress")
        assert fake.requests == []
        fake.state = "ready"
        wait(client, batch.id, "completed")
        assert len(fake.requests) == 5


def test_a_line_whose_time_runs_out_in_its_engines_sleep_is_sent_again(tmp_path: Path) -> None:
    fake = FakeClient(Script(begins=False))
    limits = config(tmp_path, request_timeout_s=2.0)
    with serve(fake, limits, KEYS) as server, client_of(server) as client:
        batch = begin(client, line("r0"))
        until(lambda: bool(fake.streams))
        fake.state, fake.sleep_clock.before_s = "sleeping", 1.0
        until(lambda: not fake.streams)  # it was given up
        fake.state, fake.script = "ready", Script()
        ended = wait(client, batch.id, "completed")
        assert set(results(client, ended.output_file_id)) == {"r0"}
        assert ended.error_file_id is None and len(fake.requests) == 2
        fake.script = Script(begins=False)
        late = wait(client, begin(client, line("r1")).id, "completed")
        assert results(client, late.error_file_id)["r1"]["response"]["status_code"] == 504


# -- bounds
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/batches",
            {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
        ),
        ("/v1/responses", {"input": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]},
        ),
    ],
)
def test_metadata_are_bounded_wherever_they_are_taken(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    largest = {f"{number:x}" + "ä" * 63: "\1" * 512 for number in range(16)}
    too_large: list[Any] = [
        largest | {"x": ""},
        {"x" * 65: ""},
        {"x": "y" * 513},
        {"x": 5},
        {"x": {}},
        ["x"],
        "x",
    ]
    with httpx.Client(base_url=server.url, headers={"x-api-key": "key-of-a"}) as http:
        for metadata in too_large:
            answer = http.post(path, json={**body, "metadata": metadata})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "metadata", (
                answer.text
            )
        answer = http.post(path, json={**body, "metadata": largest})
        assert answer.status_code == (404 if path == "/v1/batches" else 200), answer.text


def test_a_batch_keeps_its_metadata(server: RunningServer) -> None:
    with client_of(server) as client:
        file = client.files.create(file=line("one").encode(), purpose="batch")
        metadata = {f"{number:x}" + "ä" * 63: "\1" * 512 for number in range(16)}
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata=metadata,
        )
        assert (
            wait(client, batch.id, "completed").metadata
            == metadata
            == client.batches.list().data[0].metadata
        )


def test_so_many_run_at_once_and_the_others_wait(tmp_path: Path) -> None:
    fake = FakeClient(Script(begins=False))
    limits = config(tmp_path, max_running_batches=2, max_batch_lines=5)
    with (
        serve(fake, limits, KEYS) as server,
        client_of(server) as client,
        client_of(server, "key-of-b") as other,
    ):
        made = [begin(client, lines(20)).id for _ in range(4)]
        until(lambda: statuses(client) == ["in_progress"] * 2 + ["validating"] * 2)
        theirs = begin(other, lines(20)).id
        until(lambda: len(fake.streams) == 5)
        assert other.batches.retrieve(theirs).status == "validating"
        client.batches.cancel(made[3])  # one that waits
        wait(client, made[3], "cancelled")
        client.batches.cancel(made[0])
        wait(client, made[0], "cancelled")
        wait(other, theirs, "in_progress")  # before the third: who has nothing comes first
        assert statuses(client) == ["cancelled", "in_progress", "validating", "cancelled"]
        until(lambda: len(fake.streams) == 5)


@pytest.mark.slow
def test_lines_of_a_long_batch_do_not_hold_up_those_of_another_tenant(tmp_path: Path) -> None:
    fake = FakeClient(Script(pause_s=0.01))
    limits = config(tmp_path, max_batch_lines=2)
    with (
        serve(fake, limits, KEYS) as server,
        client_of(server) as client,
        client_of(server, "key-of-b") as other,
    ):
        long = begin(client, lines(300))
        until(lambda: counts_of(client, long.id).completed > 0)
        wait(other, begin(other, lines(5)).id, "completed")
        assert client.batches.retrieve(long.id).status == "in_progress"
        client.batches.cancel(long.id)
        assert wait(client, long.id, "cancelled").request_counts.completed < 300


@pytest.mark.slow
def test_what_waits_and_runs_takes_little_memory_however_large_the_files_are(
    tmp_path: Path,
) -> None:
    fake = FakeClient(Script(begins=False))
    limits = config(tmp_path, max_file_bytes=50 << 20, max_running_batches=20)
    filler = "x" * 20_000
    text = "\n".join(line(f"r{number}", ignored=filler) for number in range(500))
    with serve(fake, limits, KEYS) as server, client_of(server) as client:
        file = client.files.create(file=text.encode(), purpose="batch")
        del text
        before = resident_bytes(os.getpid())
        for _ in range(12):
            client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        until(lambda: set(statuses(client)) == {"in_progress"})
        until(lambda: len(fake.streams) > 0)
        assert resident_bytes(os.getpid()) - before < 60 << 20, "the inputs are 12 times 10 MB"
        for each in client.batches.list():
            client.batches.cancel(each.id)
        until(lambda: set(statuses(client)) == {"cancelled"})
        assert fake.streams == []


def test_an_answer_is_appended_and_nothing_else_is_written(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    replace = DataFolder.replace

    def counted(folder: DataFolder, path: Path, data: bytes) -> None:
        written.append(path.name)
        replace(folder, path, data)

    monkeypatch.setattr(DataFolder, "replace", counted)
    with client_of(server) as client:
        batch = wait(client, begin(client, lines(60)).id, "completed")
        assert batch.request_counts.completed == 60
        assert written.count(f"{batch.id}.json") <= 3, "when it was made, began and ended"


def test_a_batch_leaves_its_tenant_half_of_what_it_may_have_in_flight(tmp_path: Path) -> None:
    keys = key_ring([(Tenant("a", max_concurrency=4), ["key-of-a"])])
    gate = threading.Event()
    fake = FakeClient(Script(gate=gate))
    with serve(fake, config(tmp_path), keys) as server, client_of(server) as client:
        batch = begin(client, lines(9))
        until(lambda: len(fake.streams) == 2)
        fake.script = Script()
        answer = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}]
        )
        assert answer.choices[0].message.content == "one two three" and len(fake.streams) == 2
        gate.set()
        assert wait(client, batch.id, "completed").request_counts.completed == 9


def test_what_can_never_be_served_is_an_error_and_what_cannot_be_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "_MAX_REST_S", 0.05)
    keys = key_ring([(Tenant("a", tokens_per_minute=50), ["key-of-a"])])
    fake = FakeClient(Script(raises=UnavailableError("not now", state="draining")))
    with serve(fake, config(tmp_path), keys) as server, client_of(server) as client:
        text = "\n".join(
            [line("good"), line("long", messages=[{"role": "user", "content": "word " * 200}])]
        )
        batch = begin(client, text)
        wait(client, batch.id, "in_progress")
        until(lambda: counts_of(client, batch.id).failed == 1)
        fake.script = Script()
        batch = wait(client, batch.id, "completed")
        assert set(results(client, batch.output_file_id)) == {"good"}
        [error] = results(client, batch.error_file_id).values()
        assert (
            error["response"]["status_code"] == 429
            and error["response"]["body"]["error"]["code"] == "tenant_rate"
        )


def test_a_batch_that_has_ended_can_be_deleted(tmp_path: Path) -> None:
    fake = FakeClient(Script(begins=False))
    with serve(fake, config(tmp_path), KEYS) as server, httpx.Client(base_url=server.url) as http:
        mine, theirs = {"x-api-key": "key-of-a"}, {"x-api-key": "key-of-b"}
        with client_of(server) as client:
            batch = begin(client, lines(3))
            url = f"/v1/batches/{batch.id}"
            refused = http.delete(url, headers=mine)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                409,
                "batch_not_ended",
            )
            client.batches.cancel(batch.id)
            wait(client, batch.id, "cancelled")
            assert http.delete(url, headers=theirs).status_code == 404
            until(lambda: http.delete(url, headers=mine).status_code == 200)
            assert (
                http.get(url, headers=mine).status_code
                == http.delete(url, headers=mine).status_code
                == 404
            )
            assert list(client.batches.list()) == []
            for file in client.files.list():  # its input, and perhaps what was not answered
                client.files.delete(file.id)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


def test_so_many_of_a_tenant_may_wait(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_UNENDED", 0)
    with client_of(server) as client, pytest.raises(openai.RateLimitError) as caught:
        begin(client, lines(1))
    assert caught.value.code == "too_many_batches"


def test_an_input_that_is_deleted_meanwhile_ends_its_batch_and_what_was_answered_stays(
    tmp_path: Path,
) -> None:
    gate = threading.Event()
    fake = FakeClient(Script(gate=gate))
    limits = config(tmp_path, max_batch_lines=2)
    with serve(fake, limits, KEYS) as server, client_of(server) as client:
        batch = begin(client, lines(9))
        until(lambda: len(fake.streams) == 2)
        client.files.delete(batch.input_file_id)
        gate.set()
        batch = wait(client, batch.id, "failed")
        assert "there is no file" in batch.errors.data[0].message
        assert len(results(client, batch.output_file_id)) == batch.request_counts.completed >= 2


# -- clocks
# --------------------------------------------------------------------------------------------------


def test_a_clock_that_is_set_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, shifts_s, real = threading.Event(), [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + shifts_s[-1])
    fake, limits = FakeClient(Script(gate=gate)), config(tmp_path, max_running_batches=1)
    with serve(fake, limits, KEYS) as server, client_of(server) as client:
        running, waiting = begin(client, lines(3)), begin(client, lines(3))
        wait(client, running.id, "in_progress")
        for shift_s in (30 * 24 * 3600.0, -30 * 24 * 3600.0):
            shifts_s.append(shift_s)
            later = begin(client, lines(1))
            assert next(each.id for each in client.batches.list()) == later.id, "newest first"
        gate.set()
        for batch in (running, waiting, later):
            assert wait(client, batch.id, "completed").request_counts.failed == 0


def test_after_a_restart_a_batch_has_a_day_at_most_whatever_the_clock_says(tmp_path: Path) -> None:
    with (
        serve(FakeClient(Script(begins=False)), config(tmp_path), KEYS) as server,
        client_of(server) as client,
    ):
        made = [begin(client, lines(2)).id for _ in range(2)]
        for batch_id in made:
            wait(client, batch_id, "in_progress")
    # the clock was set forward, or back
    for batch_id, expires_at in zip(made, (5, 1 << 40), strict=True):
        path = tmp_path / "a" / "batches" / f"{batch_id}.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"expires_at": expires_at}))
    with (
        serve(FakeClient(Script(begins=False)), config(tmp_path), KEYS) as server,
        client_of(server) as client,
    ):
        wait(client, made[0], "expired")
        wait(client, made[1], "in_progress")
        [app] = [server.server.config.loaded_app]
        while not hasattr(app, "routes"):
            app = app._app
        [owner] = {
            route.endpoint.__wrapped__.__self__
            for route in app.routes
            if route.path == "/v1/batches"
        }
        assert owner._jobs[made[1]]._left_s <= 24 * 3600


@pytest.mark.slow
def test_batches_expire_whether_they_run_or_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_LIFE_S", 1)
    fake = FakeClient(Script(begins=False))
    limits = config(tmp_path, max_running_batches=1, max_batch_lines=1)
    with serve(fake, limits, KEYS) as server, client_of(server) as client:
        running, waiting = begin(client, lines(5)), begin(client, lines(5))
        for batch in (waiting, running):
            assert wait(client, batch.id, "expired").request_counts.completed == 0
        assert counts_of(client, running.id).failed == 5
        assert fake.streams == []


# -- disks
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_while_the_disk_takes_nothing_a_batch_waits_and_nobody_else_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, gate = FaultyDisk(monkeypatch), threading.Event()
    fake = FakeClient(Script(gate=gate))
    with serve(fake, config(tmp_path), KEYS) as server, client_of(server) as client:
        batch = begin(client, lines(40))
        until(lambda: len(fake.streams) > 3)
        disk.room_bytes = 300  # room for one answer and a piece of the next
        gate.set()
        until(lambda: disk.num_refused > 2)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        answer = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}]
        )
        assert answer.choices[0].message.content == "one two three"
        with pytest.raises(openai.InternalServerError) as caught:
            client.files.create(file=b"x", purpose="batch")
        assert caught.value.status_code == 507
        assert httpx.get(f"{server.url}/livez").status_code == 200
        num_asked = len(fake.requests)
        disk.room_bytes = None
        batch = wait(client, batch.id, "completed")
        assert set(results(client, batch.output_file_id)) == {f"r{number}" for number in range(40)}
        assert num_asked < 40 == len(fake.requests) - 1, (
            "nothing was sent meanwhile, and nothing twice"
        )
    assert (
        "waits until the data folder can be written again" in caplog.text
        and "goes on" in caplog.text
    )
    assert str(tmp_path) not in caplog.text


@pytest.mark.slow
def test_a_batch_that_the_disk_holds_up_can_be_cancelled_and_the_server_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, gate = FaultyDisk(monkeypatch), threading.Event()
    fake = FakeClient(Script(gate=gate))
    with serve(fake, config(tmp_path), KEYS) as server, client_of(server) as client:
        made = [begin(client, lines(10)).id for _ in range(2)]
        until(lambda: len(fake.streams) > 3)
        disk.room_bytes = 0
        gate.set()
        until(lambda: disk.num_refused > 2)
        assert client.batches.cancel(made[0]).status == "cancelling"
    disk.room_bytes = None
    with serve(FakeClient(), config(tmp_path), KEYS) as server, client_of(server) as client:
        for batch_id in made:
            assert len(results(client, wait(client, batch_id, "completed").output_file_id)) == 10


def test_a_folder_that_is_deleted_under_the_server_costs_what_was_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with serve(FakeClient(), config(folder), KEYS) as server, client_of(server) as client:
        wait(client, begin(client, lines(2)).id, "completed")
        shutil.rmtree(folder)
        for ask in (
            lambda: client.files.list(),
            lambda: client.batches.list(),
            lambda: client.files.retrieve("file-" + "0" * 24),
            lambda: begin(client, lines(1)),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                ask()
            assert caught.value.status_code == 507 and caught.value.code == "storage_failed"
        assert client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}]
        ).choices
        assert httpx.get(f"{server.url}/livez").status_code == 200
        folder.mkdir()
        assert list(client.files.list()) == [] and list(client.batches.list()) == []
        assert wait(client, begin(client, lines(2)).id, "completed").request_counts.completed == 2


def test_a_folder_that_goes_while_a_batch_runs_ends_the_batch_alone(tmp_path: Path) -> None:
    folder, gate = tmp_path / "data", threading.Event()
    fake = FakeClient(Script(gate=gate))
    with serve(fake, config(folder), KEYS) as server, client_of(server) as client:
        batch = begin(client, lines(40))
        until(lambda: len(fake.streams) > 3)
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        gate.set()
        fake.script = Script()
        failed = wait(client, batch.id, "failed")
        assert failed.errors.data[0].message
        assert wait(client, begin(client, lines(2)).id, "completed").request_counts.completed == 2


def test_results_count_as_what_their_tenant_stores(tmp_path: Path) -> None:
    limits = config(tmp_path, max_stored_file_bytes=9_000, max_batch_lines=1)
    with serve(FakeClient(), limits, KEYS) as server, client_of(server) as client:
        batch = wait(client, begin(client, lines(40)).id, "failed")
        assert batch.errors.data[0].code == "too_many_bytes"
        kept = results(client, batch.output_file_id)
        assert 0 < len(kept) == batch.request_counts.completed < 40
        client.files.delete(batch.input_file_id)
        client.files.delete(batch.output_file_id)
        assert wait(client, begin(client, lines(2)).id, "completed").request_counts.completed == 2
