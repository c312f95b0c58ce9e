"""Records behave as frozen dataclasses of the same fields do."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import pytest

from quire.common.frozen_record import FrozenRecord, replace, values_of


class Place(FrozenRecord):
    """A record."""

    row: int
    column: int = 0
    kind: ClassVar[str] = "place"

    @cached_property
    def total(self) -> int:
        """Their sum."""
        return self.row + self.column


class Named(Place):
    """One that extends it, and has another default."""

    column: int = 7
    name: str = "?"


class Bare(Place):
    """One that adds nothing."""


@dataclass(frozen=True)
class Model:
    """What `Named` would be as a dataclass."""

    row: int
    column: int = 7
    name: str = "?"


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, 2, "x"), {}),
    ((), {"row": 1, "name": "x"}),
    ((1,), {"name": "x"}),
    ((), {}),
    ((1, 2, "x", 3), {}),
    ((1,), {"row": 1}),
    ((1,), {"other": 1}),
    ((), {"column": 1, "other": 1}),
    ((1,), {"kind": "x"}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_it_takes_what_a_dataclass_takes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        wanted = Model(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError, match=r"Named\(row, column=7, name='\?'\) was called with"):
            Named(*args, **kwargs)
    else:
        found = Named(*args, **kwargs)
        assert values_of(found) == (found.row, found.column, found.name)
        assert repr(found) == repr(wanted).replace("Model", "Named")


def test_equal_ones_have_the_same_class_and_values() -> None:
    first, same = Place(1, 2), Place(1, 2)
    assert first.total == 3  # what is computed later is no field
    assert first == same and hash(first) == hash(same) and len({first, same}) == 1
    assert first != Place(1, 3)
    assert first != Bare(1, 2) and Bare(1, 2) == Bare(1, 2)
    assert first != (1, 2)


def test_it_cannot_be_changed() -> None:
    place: Any = Place(1)
    for name in ("row", "other"):
        with pytest.raises(AttributeError, match=name):
            setattr(place, name, 5)
        with pytest.raises(AttributeError, match=name):
            delattr(place, name)
    assert place == Place(1)


def test_class_variables_are_no_fields() -> None:
    assert Named.__match_args__ == ("row", "column", "name") and Bare(1).kind == "place"


def test_patterns_name_fields_by_place() -> None:
    match Named(1, name="x"):
        case Place(row, column):
            assert (row, column) == (1, 7)
        case _:
            pytest.fail("no match")


def test_copies() -> None:
    named = Named(1, name="x")
    assert copy.copy(named) == copy.deepcopy(named) == replace(named) == named
    assert replace(named, row=2) == Named(2, 7, "x") and named.row == 1
    with pytest.raises(TypeError, match="other"):
        replace(named, other=1)


def test_replace_takes_dataclasses_too() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        size: int = 1
        names: tuple[str, ...] = field(default=())

    assert replace(Settings(size=2), names=("x",)) == Settings(size=2, names=("x",))


def test_classes_have_no_methods_made_for_them() -> None:
    """Which is what they are for: compiling these is what takes a dataclass its time."""
    assert {"__init__", "__eq__", "__hash__", "__repr__"}.isdisjoint(vars(Named))
