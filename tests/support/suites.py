"""Which cells of a table of parameters the fast suite runs.

A test that is marked `slow_combinations` runs there with a covering set of its cells, and with the
others in the slow suite: with each value of each parameter at least once (each-choice coverage),
or, with `pairs=True`, with each pair of values of two parameters (pairwise coverage).
`slow_except` names the cells that are fast, as patterns of their ids.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import pytest

Cell = Mapping[str, Any]
"""Names of parameters to values."""


def covering(cells: Sequence[Cell], strength: int) -> set[int]:
    """Choose cells, greedily and in their order, in which all that occurs of `strength` values of
    different parameters occurs."""
    parts = [set(_combined(cell, min(strength, len(cell)))) for cell in cells]
    missing, chosen = set().union(*parts), set[int]()
    while missing:
        best = max(range(len(cells)), key=lambda index: (len(parts[index] & missing), -index))
        chosen.add(best)
        missing -= parts[best]
    return chosen


def _combined(cell: Cell, strength: int) -> Iterable[Hashable]:
    values = [(name, type(value), _key(value)) for name, value in sorted(cell.items())]
    return combinations(values, strength)


def _key(value: Any) -> Hashable:
    """Equal of equal values; of others, as long as they live, of the same object."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value  # type: ignore[no-any-return]


def mark_slow(items: Iterable[pytest.Item], *, has_all_cells: bool) -> None:
    """Mark what the two markers leave to the slow suite. `has_all_cells`: no cell was asked for by
    its id, so a table without a fast cell is a mistake."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None and hasattr(item, "callspec"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, table in tables.items():
        chosen = _fast_cells(table)
        if not chosen and has_all_cells:
            raise pytest.UsageError(f"{name}: `slow_except` matches the id of no cell")
        for index, item in enumerate(table):
            if index not in chosen:
                item.add_marker(pytest.mark.slow)


def _fast_cells(table: Sequence[Any]) -> Collection[int]:
    """Indices of the cells of one test that stay in the fast suite."""
    if (named := table[0].get_closest_marker("slow_except")) is not None:
        return [
            index
            for index, item in enumerate(table)
            if any(fnmatchcase(item.callspec.id, pattern) for pattern in named.args)
        ]
    if (marker := table[0].get_closest_marker("slow_combinations")) is not None:
        strength = 2 if marker.kwargs.get("pairs") else 1
        return covering([item.callspec.params for item in table], strength)
    return range(len(table))
