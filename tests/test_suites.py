"""The fast suite's choice of cells covers what it promises, and what a run left out is said."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from suites import covering

PARTS: dict[str, list[Any]] = {
    "isa": ["a", "b"],
    "dtype": ["f", "h", "i"],
    "size": [1, 2, 3, 4],
}
CELLS = [dict(zip(PARTS, values, strict=True)) for values in product(*PARTS.values())]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_of_values_occurs_in_a_chosen_cell(strength: int) -> None:
    chosen = [CELLS[index] for index in covering(CELLS, strength)]
    for names in combinations(PARTS, strength):
        found = {tuple(cell[name] for name in names) for cell in chosen}
        assert found == set(product(*(PARTS[name] for name in names)))
    assert len(chosen) <= {1: 4, 2: 15, 3: len(CELLS)}[strength]


def test_what_cannot_be_hashed_is_told_apart_by_identity() -> None:
    first, second = list[int](), list[int]()
    assert covering([{"options": each} for each in (first, second, first)], 1) == {0, 1}
    assert covering([{"flag": True}, {"flag": 1}], 1) == {0, 1}


def test_a_single_cell_is_always_chosen() -> None:
    assert covering([{"name": "x"}], 2) == {0}
    assert covering([], 1) == set()


@pytest.mark.slow
def test_a_run_without_the_shared_data_says_how_much_it_left_out(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/sim/test_replay.py",
        ],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "QUIRE_SHARED": str(missing)},
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if str(missing) in line]
    num_skipped = done.stdout.partition(" skipped in ")[0].split()[-1]
    assert int(num_skipped) > 0
    assert f": {num_skipped} tests were skipped. Set QUIRE_SHARED" in line
