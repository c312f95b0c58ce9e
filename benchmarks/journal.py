"""What a comparison has measured so far, a line of JSON each, so that a run that is ended at any
moment goes on later.

Owns the file's form, what makes two runs one comparison, and the record that the lines amount to.
Never runs anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from quire.errors import QuireError

SCHEMA = "quire-compare/4"
_IDENTITY = ("schema", "model", "config", "num_threads", "first_requests", "instruction_set")
"""What must be the same for runs to be one comparison; and the machine's processor."""


class JournalError(QuireError):
    """A file of measurements that cannot be gone on with."""


class Cell(NamedTuple):
    """One run of one workload by one variant."""

    round: int
    workload: str
    variant: str


class Journal:
    """The lines of one comparison, in memory and in a file."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Opens the file, or begins it with `header`.
        JournalError if it is another comparison's or damaged."""
        self._path = path
        self.lines: list[dict[str, Any]] = read_lines(path) if path.exists() else []
        if not self.lines:
            path.write_text("")
            self.add("header", **header)
        else:
            self._check(header)
            # What a killed run has left of its last line would run into the next one.
            path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def add(self, kind: str, **fields: Any) -> None:
        """Append a line; it is on the disk when this returns."""
        line = {"kind": kind, **fields}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)

    def done(self) -> set[Cell]:
        """Return the cells measured."""
        return {_cell(line) for line in self.lines if line["kind"] == "run"}

    def expected_s(self, cell: Cell) -> float:
        """Longest time that this workload took this variant in any round, with pauses;
        0 if it never ran."""
        same = [
            line for line in self.lines if line["kind"] == "run" and _cell(line)[1:] == cell[1:]
        ]
        return max((line["wall_s"] + line["paused_s"] for line in same), default=0.0)

    def expected_ready_s(self, variant: str) -> float:
        """Longest time until this variant was ready, warm-up included; 0 if it was never opened."""
        lines = [
            line for line in self.lines if line["kind"] == "ready" and line["variant"] == variant
        ]
        return max((line["opening_s"] for line in lines), default=0.0)

    def _check(self, header: Mapping[str, Any]) -> None:
        mine = self.lines[0]
        for name in _IDENTITY:
            if mine.get(name) != header[name]:
                raise JournalError(
                    f"{self._path} was begun with another {name}; move it away, or name "
                    "another file with --json"
                )
        if mine["machine"]["cpu"] != header["machine"]["cpu"]:
            raise JournalError(
                f"{self._path} was begun on another machine ({mine['machine']['cpu']}); move "
                "it away"
            )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines; a last one without its end was being written when its run was ended,
    and is left out."""
    text = path.read_text()
    lines = []
    for number, each in enumerate(text.split("\n")[:-1], 1):
        try:
            line = json.loads(each)
        except ValueError as error:
            raise JournalError(
                f"{path}, line {number} is not JSON ({error}); move the file away"
            ) from None
        lines.append(line)
    if lines and not (isinstance(lines[0], dict) and lines[0].get("kind") == "header"):
        raise JournalError(
            f"{path} does not begin with a header; it is no journal of benchmarks.compare"
        )
    return lines


def record_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record (docs/benchmarks/records.md) without its summary.

    A variant is described as it was last; `ready_s` is the median over its processes. `failures`
    has the last failure of a variant that has never run since; `commits` are Quire's at the runs.
    Lines of schema 3 have `peaks`, measured once a round.
    """
    header = {name: value for name, value in lines[0].items() if name != "kind"}
    record: dict[str, Any] = {
        **header,
        "variants": {},
        "peaks": [],
        "measurements": [],
        "failures": {},
        "commits": [],
    }
    ready_s: dict[str, list[float]] = {}
    for line in lines[1:]:
        fields = {name: value for name, value in line.items() if name != "kind"}
        if line["kind"] == "peaks":
            record["peaks"].append(fields)
        elif line["kind"] == "ready":
            ready_s.setdefault(line["variant"], []).append(line["ready_s"])
            record["variants"][line["variant"]] = {
                name: value for name, value in fields.items() if name != "variant"
            }
        elif line["kind"] == "failed":
            record["failures"][line["variant"]] = line["error"]
        else:
            record["failures"].pop(line["variant"], None)
            record["measurements"].append(fields)
            if line["commit"] not in record["commits"]:
                record["commits"].append(line["commit"])
    for name, times in ready_s.items():
        record["variants"][name]["ready_s"] = median(times)
    named = {each["workload"] for each in record["measurements"]}
    record["workloads"] = {
        name: counts for name, counts in record["workloads"].items() if name in named
    }
    return record


def _cell(line: Mapping[str, Any]) -> Cell:
    return Cell(line["round"], line["workload"], line["variant"])
