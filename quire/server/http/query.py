"""The query of a URL: read once, for every route, into the record that the route
declares.

Owns the judging of query strings. A record has fields of `int` with both bounds, `str` with a
greatest length, or `Literal`s, each with a default. Whole numbers are ASCII digits; what is given
twice or out of bounds is refused by name, and parameters that a route does not have are reported as
unknown fields of bodies are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, inspect
from starlette.requests import Request
from starlette.types import Scope

from quire.server.http.call import call_in
from quire.server.http.errors import bad_request

_SCOPE_KEY = "quire.query"
_MAX_PARAMETERS = 256
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,15}\Z", re.ASCII)
MAX_NUMBER = 10**15 - 1

Cursor = Annotated[str, Meta(max_length=64)]
Order = Literal["asc", "desc"]
_T = TypeVar("_T", bound=msgspec.Struct)


class NoQuery(msgspec.Struct, kw_only=True):
    """The query of a route that takes none."""


def read_query(scope: Scope, kind: type[msgspec.Struct]) -> None:
    """Judge a request's query before its route runs.
    Raises ApiError 400 with the parameter's name."""
    try:
        pairs = parse_qsl(
            scope.get("query_string", b"").decode("latin-1"),
            keep_blank_values=True,
            errors="replace",
            max_num_fields=_MAX_PARAMETERS,
        )
    except ValueError:
        raise bad_request(
            f"the URL has more than {_MAX_PARAMETERS} parameters", code="invalid_query"
        ) from None
    readers = _readers(kind)
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name not in readers:
            continue
        if name in values:
            raise bad_request(f"{name}: it is given twice", param=name, code="invalid_query")
        values[name] = readers[name](name, text)
    scope[_SCOPE_KEY] = kind(**values)
    unknown = dict.fromkeys(name for name, _ in pairs if name not in readers)
    call_in(scope).ignore(unknown, "this parameter is unknown here")


def query_of(request: Request, kind: type[_T]) -> _T:
    """Return what was read, by a route that declared `kind`."""
    query = request.scope[_SCOPE_KEY]
    assert isinstance(query, kind)
    return query


def whole_number(name: str, text: str, least: int, most: int) -> int:
    """Return a number of a URL's query or path. Raises ApiError 400."""
    if not _WHOLE_NUMBER.match(text) or not least <= int(text) <= most:
        raise bad_request(
            f"{name}: it must be a whole number from {least} to {most}",
            param=name,
            code="invalid_query",
        )
    return int(text)


@cache
def _readers(kind: type[msgspec.Struct]) -> dict[str, Callable[[str, str], Any]]:
    """Return how each parameter is read."""
    record = inspect.type_info(kind)
    assert isinstance(record, inspect.StructType)
    return {each.name: _reader(each.type) for each in record.fields}


def _reader(kind: inspect.Type) -> Callable[[str, str], Any]:
    if isinstance(kind, inspect.IntType):
        least, most = kind.ge, kind.le
        assert least is not None and most is not None
        return lambda name, text: whole_number(name, text, least, most)
    if isinstance(kind, inspect.StrType):
        longest = kind.max_length
        assert longest is not None
        return lambda name, text: _text(name, text, longest)
    assert isinstance(kind, inspect.LiteralType)
    return lambda name, text: _choice(name, text, kind.values)


def _text(name: str, text: str, longest: int) -> str:
    if len(text) > longest:
        raise bad_request(
            f"{name}: it may have at most {longest} characters", param=name, code="invalid_query"
        )
    return text


def _choice(name: str, text: str, choices: tuple[Any, ...]) -> str:
    if text not in choices:
        raise bad_request(
            f"{name}: it must be {' or '.join(map(str, choices))}", param=name, code="invalid_query"
        )
    return text
