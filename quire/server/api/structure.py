"""The output schema of an answer, from the several fields that can give one to the engine's one
parameter.

OpenAI's `response_format` (chat) and `text.format` (responses), and vLLM's `structured_outputs` and
`guided_*`. Exactly one may ask. Whatever is wrong, down to a grammar that cannot be compiled, is
answered with 400 and the name of the field that asked; a form is never dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.core.json_schema import MAX_SCHEMA_BYTES, closed_schema
from quire.core.structure import StructuredOutputsParams
from quire.errors import InvalidParameterError
from quire.grammar.judge import judge
from quire.server.http.errors import ApiError, bad_request
from quire.server.http.off_loop import off_loop

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""Of schemas and functions."""
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}

Asked = tuple[str, Mapping[str, Any]]
"""The name of the field that asks, and what for: fields of `StructuredOutputsParams`."""


async def settle(asked: Sequence[Asked]) -> StructuredOutputsParams | None:
    """Return the one output schema that is given, if any, and known to be possible. Raises ApiError
    400."""
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise bad_request(
            f"{names} both ask for a form of the answer; give one of them", param=asked[1][0]
        )
    ((param, values),) = asked
    num_bytes = len(msgspec.json.encode(values))
    if num_bytes > 2 * MAX_SCHEMA_BYTES:  # found out in a moment, where the loop waits for it
        raise bad_request(f"{param}: it is larger than {MAX_SCHEMA_BYTES} bytes", param=param)
    try:
        structure = await off_loop(num_bytes, lambda: StructuredOutputsParams.from_mapping(values))
        await judge.check_async(structure.wire)
    except InvalidParameterError as error:
        raise _renamed(error, param) from None
    return structure


def asks_for_json(asked: Sequence[Asked]) -> bool:
    """Return whether JSON is requested, beside which an answer may be a call instead."""
    return any(
        values.get(name)
        for _, values in asked
        if isinstance(values, Mapping)
        for name in ("json", "json_object")
    )


def from_response_format(value: object, param: str = "response_format") -> list[Asked]:
    """Return the output schema of a chat's `response_format`."""
    if value is None:
        return []
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise bad_request(
            f"{param}: its type must be text, json_object or json_schema", param=f"{param}.type"
        )
    if kind == "text":
        return []
    if kind == "json_object":
        schema = value.get("schema")  # as llama.cpp has it
        return [
            (param, {"json_object": True})
            if schema is None
            else (f"{param}.schema", {"json": schema})
        ]
    schema = value.get("json_schema")
    if not isinstance(schema, Mapping):
        raise bad_request(
            f"{param}.json_schema: it must be an object", param=f"{param}.json_schema"
        )
    return from_named_schema(schema, f"{param}.json_schema")


def from_named_schema(value: Mapping[str, Any], param: str) -> list[Asked]:
    """Return a schema with a name, as OpenAI wants it. Answers always have the form,
    and no keys that it does not declare."""
    name, schema, strict = value.get("name"), value.get("schema"), value.get("strict")
    if not isinstance(name, str) or not NAME.match(name):
        raise bad_request(
            f"{param}.name: it must have 1 to 64 letters, digits, - or _", param=f"{param}.name"
        )
    if not isinstance(strict, bool | None):
        raise bad_request(f"{param}.strict: it must be true or false", param=f"{param}.strict")
    if schema is None:
        return [(f"{param}.schema", {"json": {"type": "object"}})]
    return [from_schema(schema, f"{param}.schema", is_strict=bool(strict))]


def from_schema(schema: object, param: str, *, is_strict: bool = False) -> Asked:
    """Return a JSON schema with no keys that it does not declare, and no integers without end.
    Raises ApiError 400."""
    if isinstance(schema, Mapping):
        try:
            schema = closed_schema(schema, param, is_strict=is_strict)
        except InvalidParameterError as error:
            raise _renamed(error, param) from None
    return param, {"json": schema}


def from_guided(request: object) -> list[Asked]:
    """Return the output schema of vLLM's fields, its older ones too."""
    asked: list[Asked] = []
    for name, form in GUIDED.items():
        value = getattr(request, name)
        if value is not None:
            asked.append((name, {form: value}))
    structured = getattr(request, "structured_outputs")  # noqa: B009 - the record's type is not known here
    if structured is not None:
        asked.append(("structured_outputs", structured))
    return asked


def _renamed(error: InvalidParameterError, param: str) -> ApiError:
    """Return the error under the name of the field that asked."""
    _, _, problem = str(error).partition(": ")
    shown = error.param if param == "structured_outputs" and error.param else param
    return bad_request(f"{shown}: {problem}", param=shown)
