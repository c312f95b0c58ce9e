"""`FrozenRecord`: immutable plain data, whose classes cost next to nothing to make.

`@dataclass` compiles half a dozen functions for every class, some 0.5 ms, and the words in which
models and programs are declared are seventy classes, of which a start makes few objects. The
methods here are the same for all records and go by the names of their fields. An object takes 2 us
in place of 0.5: where steps or tokens make them, or a model has thousands, a dataclass is the
right thing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar, dataclass_transform


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


_Some = TypeVar("_Some", bound="FrozenRecord | _Dataclass")


@dataclass_transform(frozen_default=True)
class FrozenRecord:
    """Base of records. A subclass names its fields by annotations, as for `@dataclass`, behind
    those of the record that it extends; a default has to be immutable, for all objects share it."""

    __match_args__: ClassVar[tuple[str, ...]] = ()
    """The names of the fields, in order."""
    _names: ClassVar[frozenset[str]] = frozenset()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        own = [name for name, kind in cls.__annotations__.items() if not _is_class_variable(kind)]
        names = tuple(dict.fromkeys((*cls.__match_args__, *own)))
        given = {name: vars(cls)[name] for name in own if name in vars(cls)}
        cls.__match_args__ = names  # type: ignore[misc]  # mypy takes it for its own
        cls._names, cls._defaults = frozenset(names), {**cls._defaults, **given}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names, values = self.__match_args__, self.__dict__
        values.update(self._defaults)
        values.update(zip(names, args, strict=False))
        values.update(kwargs)
        is_given_twice = args and not kwargs.keys().isdisjoint(names[: len(args)])
        if values.keys() != self._names or len(args) > len(names) or is_given_twice:
            self._refuse(args, kwargs)

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        expected = [
            f"{name}={self._defaults[name]!r}" if name in self._defaults else name
            for name in self.__match_args__
        ]
        raise TypeError(
            f"{type(self).__qualname__}({', '.join(expected)}) was called with ({', '.join(given)})"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return values_of(self) == values_of(other)

    def __hash__(self) -> int:
        return hash(values_of(self))

    def __repr__(self) -> str:
        values = zip(self.__match_args__, values_of(self), strict=True)
        fields = ", ".join(f"{name}={value!r}" for name, value in values)
        return f"{type(self).__qualname__}({fields})"


def values_of(record: FrozenRecord) -> tuple[Any, ...]:
    """Return the values of a record's fields, in their order."""
    return tuple(map(record.__dict__.__getitem__, record.__match_args__))


def replace(record: _Some, **changes: Any) -> _Some:
    """Return a copy of a record, or of a dataclass, with other values of some fields."""
    if not isinstance(record, FrozenRecord):
        return dataclasses.replace(record, **changes)
    values = zip(record.__match_args__, values_of(record), strict=True)
    return type(record)(**{**dict(values), **changes})


def _is_class_variable(kind: object) -> bool:
    return str(kind).removeprefix("typing.").startswith("ClassVar")
