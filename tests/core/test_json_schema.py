"""Schemas are judged before they are compiled: no keyword is passed over, and none is too large."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from quire.core.json_schema import (
    _ENFORCED,
    _NAMED_SUBSCHEMAS,
    _SUBSCHEMAS,
    checked_schema,
    closed_schema,
)
from quire.errors import InvalidParameterError


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidParameterError) as caught:
        checked_schema(schema, "json")
    assert caught.value.param == "json"
    return str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {
            "$defs": {"not": {"type": "null"}},
            "$ref": "#/$defs/not",
            "title": "names are no keywords",
        },
        {
            "properties": {"if": {"type": "string", "format": "uuid"}, "uniqueItems": True},
            "required": ["if"],
        },
        {
            "enum": [{"not": 1}],
            "const": {"foo": 2},
            "default": {"bar": 3},
            "examples": [{"baz": 4}],
        },
        {"anyOf": [{"type": "string"}, {"type": "null"}], "discriminator": {"propertyName": "x"}},
    ],
)
def test_what_can_be_enforced_passes(schema: Any) -> None:
    assert json.loads(checked_schema(schema, "json")) == ({} if schema is True else schema)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {}}, "not"),
        ({"properties": {"a": {"anyOf": [{"items": {"uniqueItems": True}}]}}}, "uniqueItems"),
        ({"$defs": {"a": {"if": {}}}}, "if"),
        ({"patternProperties": {"^a": {"contains": {}}}}, "contains"),
        ({"prefixItems": [{"additionalProperties": {"propertyNames": {}}}]}, "propertyNames"),
        ({"items": [{"minimun": 3}]}, "minimun"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_named_wherever_it_stands(
    schema: Any, keyword: str
) -> None:
    assert repr(keyword) in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "https://example.com/a"}, "does not begin with '#'"),
        ({"$ref": 5}, "does not begin with '#'"),
        ({"format": "regex"}, "format"),
        ({"pattern": "a" * 5000}, "pattern"),
        ({"properties": {str(number): {} for number in range(1001)}}, "1000 properties"),
        (False, "accepts nothing"),
        ({"items": 5}, "where a schema must stand"),
        ({"anyOf": {}}, "where a list must stand"),
        ({"properties": []}, "where an object must stand"),
        ({"enum": list(range(10_001))}, "10000 values"),
        ({"anyOf": [{}] * 5000}, "subschemas"),
        ({"description": "x" * 300_000}, "bytes"),
        ('{"items":' * 60_000 + "{}" + "}" * 60_000, "bytes"),
        ('{"items":' * 20_000 + "{}" + "}" * 20_000, "deep"),
        ('{"items":' * 100 + "{}" + "}" * 100, "deep"),
        ({"minimum": float("nan")}, "not valid JSON"),
        ({1: 2, "a": object()}, "not valid JSON"),
        ("[1]", "must be a JSON schema"),
    ],
)
def test_what_else_is_refused(schema: Any, words: str) -> None:
    assert words in refusal(schema)


@pytest.mark.parametrize("keyword", sorted(_ENFORCED | _SUBSCHEMAS | _NAMED_SUBSCHEMAS))
@pytest.mark.parametrize("value", [None, True, 5, "a", [], [5], {}, {"a": 5}])
def test_no_value_of_a_keyword_breaks_the_closing_of_a_schema(keyword: str, value: Any) -> None:
    """A wrong one is refused by what reads the schema next, in words."""
    for schema in ({keyword: value}, {"properties": {"a": {"type": "object", keyword: value}}}):
        closed_schema(schema, "schema", is_strict=True)


_X = {"$ref": "#/$defs/x"}


@pytest.mark.parametrize(
    "x",
    [
        _X,
        {"$ref": "#/properties/a"},
        {"allOf": [_X, {"type": "null"}]},
        {"anyOf": [_X, {"allOf": [_X]}]},
        {"oneOf": [{"anyOf": [_X]}], "type": "string"},
    ],
)
def test_a_schema_that_is_nothing_but_itself_is_refused(x: dict[str, Any]) -> None:
    """It compiles, and where an answer comes to it nothing can follow."""
    for schema in (
        {"properties": {"a": _X}, "$defs": {"x": x}},
        {"properties": {"b": {"items": _X}, "a": x}, "$defs": {"x": x}},
    ):
        assert "back to itself" in refusal(schema)
    assert "leads from # back" in refusal({"$ref": "#"})


@pytest.mark.parametrize(
    "x",
    [
        {"anyOf": [_X, {"type": "null"}]},
        {"anyOf": [{"allOf": [_X]}, True]},
        {"items": _X},
        {"properties": {"next": _X}},
        {"$ref": "#/$defs/unknown"},
        {"anyOf": []},
    ],
)
def test_a_schema_that_may_contain_itself_passes(x: dict[str, Any]) -> None:
    """Those that are wrong otherwise are for the compiler to refuse."""
    checked_schema({"properties": {"a": _X}, "$defs": {"x": x}}, "json")


_SELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("#", {"type": "object", "properties": {"a": _SELF}, "required": ["a"]}),
        ("#", {"type": "array", "items": _SELF, "minItems": 1}),
        ("#", {"type": "array", "items": [{}, _SELF], "minItems": 2}),
        ("#", {"type": "array", "prefixItems": [_SELF], "minItems": 1}),
        ("#", {"type": "object", "additionalProperties": _SELF, "required": ["a"]}),
        ("#", {"type": "object", "additionalProperties": _SELF, "minProperties": 1}),
        (
            "#",
            {
                "type": "object",
                "patternProperties": {"^a": _SELF},
                "additionalProperties": False,
                "required": ["ab"],
            },
        ),
        ("#", {"type": ["object", "array"], "required": ["a"], "minItems": 1,
               "properties": {"a": _SELF}, "items": _SELF}),
        ("#/$defs/x", {"properties": {"b": _X}, "$defs": {"x": {"type": "array", "items": _X, "minItems": 2}}}),
        (
            "#/$defs/x",
            {
                "type": "object",
                "properties": {"a": {"anyOf": [_X, {"$ref": "#/$defs/y~1z"}]}},
                "required": ["a"],
                "$defs": {
                    "x": {"type": "object", "properties": {"y/z": {"$ref": "#/$defs/y~1z"}}, "required": ["y/z"]},
                    "y/z": {"type": "array", "items": {"allOf": [{}, _X]}, "minItems": 1},
                },
            },
        ),
    ],
)  # fmt: skip
def test_a_schema_that_requires_itself_is_refused(place: str, schema: dict[str, Any]) -> None:
    assert f"leads from {place} back" in refusal(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object", "null"], "properties": {"a": _SELF}, "required": ["a"]},
        {"properties": {"a": _SELF}, "required": ["a"]},
        {"type": "object", "properties": {"a": _SELF}},
        {"type": "object", "properties": {"a": {"type": "array", "items": _SELF}}, "required": ["a"]},
        {"type": "array", "items": _SELF, "minItems": 0},
        {"type": "array", "prefixItems": [{}], "items": _SELF, "minItems": 1},
        {"type": "array", "items": [{}], "additionalItems": _SELF, "minItems": 1},
        {"type": "object", "properties": {"a": {"anyOf": [_SELF, {"type": "null"}]}}, "required": ["a"]},
        {"type": "object", "properties": {"a": _SELF}, "minProperties": 1},
        {"type": "object", "properties": {"a": {}, "b": _SELF}, "minProperties": 1, "additionalProperties": False},
        {"type": "object", "required": "a", "minProperties": "1", "properties": {"a": _SELF}},
        {"type": "object", "properties": {"a": False}},
        {"type": "object", "required": ["a"], "additionalProperties": False, "minProperties": 2},
        {"type": 3, "properties": {"a": _SELF}, "required": ["a"]},
    ],
)  # fmt: skip
def test_a_schema_that_need_not_contain_itself_passes(schema: dict[str, Any]) -> None:
    checked_schema(schema, "json")


def test_finding_what_has_no_end_takes_no_longer_than_the_schema_is_long() -> None:
    """Every name that is required could stand for each of the patterns."""
    schema = {
        "type": "object",
        "required": [f"r{number}" for number in range(12_000)],
        "patternProperties": {f"^p{number}": _SELF for number in range(1000)},
        "additionalProperties": False,
    }
    began_s = time.thread_time()
    assert "leads from # back" in refusal(schema)
    assert time.thread_time() - began_s < 2.0


def test_a_strict_schema_is_closed_wherever_an_object_stands() -> None:
    item = {"type": "object", "properties": {"x": {"type": ["object", "null"]}}}
    schema = {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": item},
            "either": {"anyOf": [{"$ref": "#/$defs/one"}, {"type": "null"}]},
            "one": {"allOf": [{"$ref": "#/$defs/one"}]},
        },
        "required": ["list"],
        "$defs": {"one": {"properties": {"y": {}}}},
    }
    before = json.dumps(schema)
    closed: Any = closed_schema(schema, "json", is_strict=True)
    assert (
        closed["required"] == ["list", "either", "one"] and closed["additionalProperties"] is False
    )
    inner = closed["properties"]["list"]["items"]
    assert inner["required"] == ["x"] and inner["additionalProperties"] is False
    assert inner["properties"]["x"]["additionalProperties"] is False
    assert closed["$defs"]["one"] == {
        "properties": {"y": {}},
        "additionalProperties": False,
        "required": ["y"],
    }
    assert json.dumps(schema) == before  # the client's own is shown to the model


def test_what_says_itself_what_else_it_holds_stays_open() -> None:
    for extra in (True, {"type": "string"}, False):
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"a": {}},
            "additionalProperties": extra,
        }
        closed: Any = closed_schema(schema, "json", is_strict=True)
        assert closed["additionalProperties"] == extra
    assert closed_schema({"type": "object"}, "json", is_strict=False) == {"type": "object"}
    loose: Any = closed_schema({"properties": {"a": {}}}, "json", is_strict=False)
    # and nothing more is required
    assert loose == {"properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {}}}],
            "$defs": {"a": {"properties": {"x": {}}}},
        },
        {"properties": {"x": {}}, "anyOf": [{"properties": {"y": {}}}, {"required": ["x"]}]},
        {"$ref": "#/$defs/a", "properties": {"y": {}}, "$defs": {"a": {"properties": {"x": {}}}}},
    ],
)
def test_objects_that_are_put_together_stay_open(schema: dict[str, Any]) -> None:
    """Each part would forbid what the others declare."""
    assert closed_schema(schema, "json", is_strict=True) == schema


@pytest.mark.parametrize("depth", [70, 300])
def test_a_schema_that_is_too_deep_is_left_to_be_refused(depth: int) -> None:
    deep: Any = json.loads('{"items":' * depth + "{}" + "}" * depth)
    with pytest.raises(InvalidParameterError, match="nested"):
        checked_schema(closed_schema(deep, "json", is_strict=True), "json")


def test_an_integer_without_bounds_is_one_that_every_program_reads() -> None:
    node = {"type": "array", "items": {"type": "integer"}}
    closed: Any = closed_schema(node, "json", is_strict=False)
    assert closed["items"] == {
        "type": "integer",
        "minimum": 1 - (1 << 53),
        "maximum": (1 << 53) - 1,
    }
    for own in ({"minimum": 0}, {"enum": [1]}, {"multipleOf": 5}):
        assert closed_schema({"type": "integer", **own}, "json", is_strict=True) == {
            "type": "integer",
            **own,
        }
