"""docs/acceptance.md is true: every promise has its row,
and every test that a row names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/acceptance.md").read_text()
_ROW = re.compile(r"^\| (T\d\d|\d{1,2}) \| ([^|]+) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def _names(path: str) -> frozenset[str]:
    """What a file of tests has on its top level."""
    names = []
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return frozenset(names)


def test_every_promise_has_its_row() -> None:
    rows = [row[0] for row in _ROW.findall(TEXT)]
    assert rows == [f"T{number:02}" for number in range(1, 43)] + [
        str(number) for number in range(1, 93)
    ]


def test_every_row_names_a_test_or_says_what_is_missing() -> None:
    assert [
        row[0] for row in _ROW.findall(TEXT) if not _TEST.search(row[2]) and not row[3].strip()
    ] == []


def test_every_test_that_is_named_exists() -> None:
    named = _TEST.findall(TEXT)
    assert len(named) > 150
    assert [
        (path, name)
        for path, name in named
        if not (ROOT / path).is_file() or name not in _names(path)
    ] == []
