"""Golden records: reading them, and the command that adds what this machine's instruction sets
lack.

`make golden` records every case on every back end of this machine that has no record yet. What was
recorded before is never overwritten without `--replace` (`make golden ARGS=--replace`), which is
for a change that is meant to change results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.golden.answers import Answer, backends, difference
from tests.golden.cases import CASES, write

PATH = Path(__file__).with_name("records.json")
COMMAND = "make golden"


@dataclass
class CaseRecords:
    """What one case answers: back ends that agree to the bit share an answer."""

    names: dict[str, str] = field(default_factory=dict)
    """Back end to the name of its answer, which is a digest of it."""
    answers: dict[str, Answer] = field(default_factory=dict)

    def of(self, backend: str) -> Answer | None:
        """The record of a back end; None where there is none."""
        return self.answers[self.names[backend]] if backend in self.names else None

    def put(self, backend: str, answer: Answer) -> None:
        """Record an answer; one that no back end has any more is dropped."""
        name = hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()[:6]
        self.names[backend], self.answers[name] = name, answer
        self.answers = {name: self.answers[name] for name in {*self.names.values()}}


Records = dict[str, CaseRecords]


def read_records() -> Records:
    """All records by the names of their cases."""
    if not PATH.exists():
        return {}
    return {name: CaseRecords(**stored) for name, stored in json.loads(PATH.read_text()).items()}


def write_records(records: Mapping[str, CaseRecords]) -> None:
    """One line a case, everything sorted."""
    lines = (
        f"{json.dumps(name)}:"
        + json.dumps(vars(records[name]), sort_keys=True, separators=(",", ":"))
        for name in sorted(records)
    )
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def record(*, replaces: bool) -> list[str]:
    """Compute all cases and record what is missing, or (`replaces`) also what differs;
    what differs, for people."""
    records = read_records()
    differences = []
    for name, case in CASES.items():
        held = records.setdefault(name, CaseRecords())
        with tempfile.TemporaryDirectory() as folder:
            path = write(case.checkpoint, Path(folder) / "checkpoint")
            for backend in backends(case):
                answer, known = backend.compute(case, path), held.of(backend.record)
                change = None if known is None else difference(answer, known)
                if change is not None:
                    differences.append(f"{name} on {backend.name}: {change}")
                if known is None or (change is not None and replaces):
                    held.put(backend.record, answer)
    if replaces:
        records = {name: held for name, held in records.items() if name in CASES}
    write_records(records)
    return differences


def main() -> None:
    """Add records; exit with 1 where results differ from those that are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--replace", action="store_true", help="overwrite records whose results have changed"
    )
    replaces = parser.parse_args().replace
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    differences = record(replaces=replaces)
    print(*differences, sep="\n", end="\n" if differences else "")
    if differences and not replaces:
        sys.exit(
            f"{len(differences)} results are not those recorded, which are kept; --replace "
            "overwrites them"
        )


if __name__ == "__main__":
    main()
