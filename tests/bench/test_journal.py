"""What was measured survives the end of a run at any moment, and amounts to one record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.journal import SCHEMA, Cell, Journal, JournalError, read_lines, record_of

HEADER: dict[str, Any] = {
    "schema": SCHEMA, "model": "m", "config": {"a": 1}, "num_threads": 2, "first_requests": None,
    "instruction_set": "avx2", "machine": {"cpu": "c"}, "versions": {"quire": "0"},
    "workloads": {"W1": {}, "W3": {}},
}  # fmt: skip


def begin(folder: Path) -> Journal:
    journal = Journal(folder / "runs.jsonl", HEADER)
    journal.add("ready", variant="quire:int8", opening_s=3.0, ready_s=1.0, version="1")
    journal.add(
        "run", round=0, workload="W1", variant="quire:int8", wall_s=5.0, paused_s=0.5, commit="a"
    )
    return journal


def test_a_run_that_was_ended_while_it_wrote_goes_on(tmp_path: Path) -> None:
    path = begin(tmp_path)._path
    whole = path.read_text()
    for length in range(len(whole) - 40, len(whole), 4):
        path.write_text(whole[:length])
        again = Journal(path, HEADER)
        assert not again.done()
        again.add(
            "run",
            round=0,
            workload="W1",
            variant="quire:int8",
            wall_s=7.0,
            paused_s=0.0,
            commit="b",
        )
        assert [line["kind"] for line in read_lines(path)] == ["header", "ready", "run"]
        assert Journal(path, HEADER).done() == {Cell(0, "W1", "quire:int8")}


def test_the_longest_time_is_expected_again(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.add(
        "run", round=1, workload="W1", variant="quire:int8", wall_s=4.0, paused_s=0.0, commit="a"
    )
    assert journal.expected_s(Cell(2, "W1", "quire:int8")) == 5.5  # with its pauses
    assert (
        journal.expected_s(Cell(2, "W3", "quire:int8"))
        == journal.expected_s(Cell(2, "W1", "quire:int4"))
        == 0.0
    )
    assert (
        journal.expected_ready_s("quire:int8") == 3.0
        and journal.expected_ready_s("vllm:int8") == 0.0
    )


def test_lines_amount_to_a_record(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.add("failed", round=0, workload="W1", variant="vllm:w8a8", error="no memory")
    journal.add("failed", round=0, workload="W3", variant="quire:int8", error="killed")
    journal.add("ready", variant="quire:int8", opening_s=9.0, ready_s=2.0, version="2")
    journal.add(
        "run", round=0, workload="W3", variant="quire:int8", wall_s=4.0, paused_s=0.0, commit="b"
    )
    record = record_of(journal.lines)
    assert {name: record[name] for name in ("model", "config", "num_threads")} == {
        "model": "m",
        "config": {"a": 1},
        "num_threads": 2,
    }
    assert record["variants"] == {"quire:int8": {"opening_s": 9.0, "ready_s": 1.5, "version": "2"}}
    assert [run["wall_s"] for run in record["measurements"]] == [5.0, 4.0]
    assert record["failures"] == {"vllm:w8a8": "no memory"}  # the other has run since
    assert record["commits"] == ["a", "b"] and list(record["workloads"]) == ["W1", "W3"]


def test_older_lines_have_the_limits_of_rounds(tmp_path: Path) -> None:
    lines = [*begin(tmp_path).lines, {"kind": "peaks", "round": 0, "read_bytes_per_s": 1.0}]
    assert record_of(lines)["peaks"] == [{"round": 0, "read_bytes_per_s": 1.0}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_threads": 3}, "another num_threads"),
        ({"config": {}}, "another config"),
        ({"machine": {"cpu": "d"}}, "another machine"),
    ],
)
def test_other_comparisons_are_not_gone_on_with(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = begin(tmp_path)._path
    before = path.read_text()
    with pytest.raises(JournalError, match=message):
        Journal(path, {**HEADER, **change})
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}\n", "no journal"), (json.dumps({"kind": "header"}) + "\nx\n", "line 2 is not")],
)
def test_other_files_are_left_alone(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(JournalError, match=message):
        Journal(path, HEADER)
    assert path.read_text() == text
