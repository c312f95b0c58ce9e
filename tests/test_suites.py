"""The fast suite's choice of cells covers what it promises."""

from __future__ import annotations

from itertools import combinations, product
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
