"""Request bodies: read within limits of bytes and time, decoded into a typed record, with errors
that name the field.

Owns everything between the socket's bytes and a checked `msgspec.Struct`. Never logs or quotes a
body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Meta, inspect
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from quire.server.http.call import Call, call_of
from quire.server.http.errors import ApiError, bad_request
from quire.server.http.off_loop import off_loop

MAX_PARTS = 1 << 18
"""Objects, lists and fields in one body: a conversation of 4,096 messages has some 30,000."""
_NO_MARKS = bytes(set(range(256)) - set(b'"{[:'))
_UNKNOWN_FIELD = "Object contains unknown field"
"""How the decoder's complaint begins."""
_MAX_UNKNOWN = 64
"""Names of unknown fields that are kept."""
_PATH = re.compile(r" - at (?:`key` in )?`\$([^`]*)`\Z")
_STEP = re.compile(r"\.([^.\[]+)")
"""Of such a path, to a field."""
_INVALID = ("Invalid enum value", "Invalid value")
_MAX_ALLOWED = 16
"""Values that an error lists."""
_T = TypeVar("_T", bound=msgspec.Struct)


async def read_body(receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body. Raises ApiError 413 above `max_bytes`, 408 after `timeout_s`,
    ClientDisconnect when it breaks off."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive within {timeout_s:g} s",
            code="body_timeout",
            headers={"connection": "close"},
        ) from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def too_large(max_bytes: int) -> ApiError:
    """413, and the end of the connection: what is left of the body will not be read."""
    return ApiError(
        413,
        f"the request body is larger than {max_bytes} bytes",
        code="request_too_large",
        headers={"connection": "close"},
    )


async def read_json(request: Request, kind: type[_T], *, is_strict: bool) -> _T:
    """Return the body as a `kind`. Fields that `kind` does not have are recorded in the call,
    or refused where `is_strict`."""
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ApiError(499, "the client went away") from None
    call = call_of(request)
    call.is_strict = is_strict
    return await read_bytes(call, body, kind)


async def read_bytes(call: Call, body: bytes, kind: type[_T]) -> _T:
    """Decode as `decode` does, beside the event loop where the body is not small. The call learns
    its size and its unknown fields, which are refused where it is strict."""
    call.num_body_bytes = len(body)
    value, unknown = await off_loop(len(body), lambda: decode(body, kind))
    call.ignore(unknown, "this field is unknown here")
    return value


def decode(body: bytes, kind: type[_T]) -> tuple[_T, list[str]]:
    """Decode a JSON object. Returns the value and the names of unknown fields. Raises ApiError 400
    naming the field.

    The decoder counts its own depth, so no nesting is too deep for it to refuse. It does not count
    how many objects it makes, each of which takes twenty times the bytes that it is written with,
    so that is done before.
    """
    _check_parts(body)
    try:
        try:
            value: _T = msgspec.json.decode(body, type=_without_others(kind))
            return value, _nested_unknown(body, kind)
        except msgspec.ValidationError as error:
            if _UNKNOWN_FIELD not in str(error):
                raise
        value = msgspec.json.decode(body, type=kind)
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        nested = _nested_unknown(body, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise bad_request("the request body is not valid JSON", code="invalid_json") from None
    known = set(kind.__struct_encode_fields__)
    unknown = [*islice((name for name in names if name not in known), _MAX_UNKNOWN), *nested]
    return value, unknown[:_MAX_UNKNOWN]


def _check_parts(body: bytes) -> None:
    """Refuse a body of more objects, lists and fields than any request has need of.
    Raises ApiError 400."""
    if (
        body.count(b"{") + body.count(b"[") + body.count(b":") > MAX_PARTS
        and _num_parts(body) > MAX_PARTS
    ):
        message = f"the request body has more than {MAX_PARTS} objects, lists and fields"
        raise bad_request(message, code="too_many_values")


def _num_parts(body: bytes) -> int:
    """ReasoningTags that begin an object or a list or follow a field's name, between strings,
    each of which is two quotes by then."""
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    return sum(map(len, marks.split(b'"')[::2]))


@cache
def _without_others(kind: type[_T]) -> type[_T]:
    """Return the same record, which refuses unknown fields: as a rule there are none,
    and then decoding once will do."""
    return cast(
        type[_T], msgspec.defstruct(kind.__name__, (), bases=(kind,), forbid_unknown_fields=True)
    )


# Fields within fields.


def shape(kind: type[msgspec.Struct], **bounds: Any) -> Meta:
    """Declares which fields an object has that is read by hand: `Annotated[Any, shape(Kind)]`.

    What has none of these names is reported as unknown fields are. It judges nothing else.
    """
    return Meta(extra={_SHAPE: kind}, **bounds)


_SHAPE = "shape"


def _nested_unknown(body: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Paths of fields within fields that `kind` does not know, at any depth;
    only those parts are decoded."""
    nested = _nested_fields(kind)
    if not nested.__struct_fields__:
        return []
    values = msgspec.json.decode(body, type=nested)
    paths = (
        path
        for field in _fields_of(kind)
        if (value := getattr(values, field.name, None)) is not None
        for path in unknown_paths(value, field.type, field.encode_name)
    )
    return list(islice(paths, _MAX_UNKNOWN))


@cache
def _nested_fields(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a record of those fields of `kind` that hold records, undecoded."""
    nested = [field for field in _fields_of(kind) if _holds_records(field.type)]
    fields: list[Any] = [(field.name, Any, None) for field in nested]
    return msgspec.defstruct(
        f"{kind.__name__}Nested", fields, rename={each.name: each.encode_name for each in nested}
    )


@cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _holds_records(info: inspect.Type) -> bool:
    if isinstance(info, inspect.Metadata):
        return _SHAPE in (info.extra or {}) or _holds_records(info.type)
    if isinstance(info, inspect.UnionType):
        return any(map(_holds_records, info.types))
    if isinstance(info, inspect.DictType):
        return _holds_records(info.value_type)
    return isinstance(info, inspect.StructType) or (
        isinstance(info, inspect.ListType) and _holds_records(info.item_type)
    )


def unknown_paths(value: Any, info: inspect.Type, path: str) -> Iterator[str]:
    """Where, within decoded JSON at `path`, objects have fields that the type does not declare."""
    if isinstance(info, inspect.Metadata):
        shaped = (info.extra or {}).get(_SHAPE)
        yield from (
            unknown_paths(value, info.type, path)
            if shaped is None
            else _unknown_in(value, shaped, path)
        )
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            if _is_meant(value, each):
                yield from unknown_paths(value, each, path)
    elif isinstance(info, inspect.ListType) and isinstance(value, list):
        for number, item in enumerate(value if _holds_records(info.item_type) else ()):
            yield from unknown_paths(item, info.item_type, f"{path}[{number}]")
    elif isinstance(info, inspect.DictType) and isinstance(value, dict):
        for name, item in value.items() if _holds_records(info.value_type) else ():
            yield from unknown_paths(item, info.value_type, f"{path}.{name}")
    elif isinstance(info, inspect.StructType):
        yield from _unknown_in(value, info.cls, path)


def _is_meant(value: Any, info: inspect.Type) -> bool:
    """Return whether an object may be this one of several records, which are told by a tag."""
    if not isinstance(info, inspect.StructType) or info.tag_field is None:
        return True
    return isinstance(value, dict) and value.get(info.tag_field) == info.tag


def _unknown_in(value: Any, kind: type[msgspec.Struct], path: str) -> Iterator[str]:
    known = {field.encode_name: field.type for field in _fields_of(kind)}
    tag_field = kind.__struct_config__.tag_field
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name == tag_field:
            continue
        if name not in known:
            yield f"{path}.{name}"
        elif isinstance(inner, dict | list):
            yield from unknown_paths(inner, known[name], f"{path}.{name}")


def convert_part(data: Any, kind: type[_T], where: str) -> _T:
    """Convert as `convert` does what stands at `where` in the body."""
    try:
        return convert(data, kind)
    except ApiError as error:
        param = f"{where}.{error.param}" if error.param else where
        shown = error.message.removeprefix(f"{error.param or 'the request body'}: ")
        raise bad_request(f"{param}: {shown}", param=param, code=error.code) from None


def convert(data: Any, kind: type[_T]) -> _T:
    """Return a record from data that was decoded already (a part of a body).
    Raises ApiError 400 naming the field."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), kind) from None


def _invalid_field(text: str, kind: type[msgspec.Struct]) -> ApiError:
    found = _PATH.search(text)
    if found is None:
        return bad_request(f"the request body is invalid: {text}", code="invalid_type")
    param = found[1].removeprefix(".").replace("[...]", "") or None
    message = text[: found.start()].replace("`", "'")
    if message.startswith(_INVALID):  # and the value, which may be anything
        message = "it is none of the values that are allowed"
        allowed = list(dict.fromkeys(_allowed(inspect.type_info(kind), found[1])))
        if 0 < len(allowed) <= _MAX_ALLOWED:
            message += f": {', '.join(map(repr, allowed))}"
    return bad_request(
        f"{param or 'the request body'}: {message}", param=param, code="invalid_type"
    )


def _allowed(info: inspect.Type, path: str) -> Iterator[object]:
    """The values that a type lists for what stands at a path, as the decoder writes it."""
    name = _STEP.match(path)
    if isinstance(info, inspect.Metadata):
        yield from _allowed(info.type, path)
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            yield from _allowed(each, path)
    elif isinstance(info, inspect.LiteralType) and not path:
        yield from info.values
    elif isinstance(info, inspect.ListType) and path.startswith("["):
        yield from _allowed(info.item_type, path[path.index("]") + 1 :])
    elif isinstance(info, inspect.DictType) and path.startswith("[...]"):
        yield from _allowed(info.value_type, path[5:])
    elif isinstance(info, inspect.StructType) and name is not None:
        if name[0] == path == f".{info.tag_field}":
            yield info.tag
        for field in info.fields:
            if field.encode_name == name[1]:
                yield from _allowed(field.type, path[name.end() :])
