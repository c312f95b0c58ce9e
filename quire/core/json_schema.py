"""JSON schemas before they are compiled: how large they may be, and which keywords can be enforced.

Owns the limits, and the rule that no keyword is passed over in silence: one that cannot be enforced
is refused by its name, wherever it stands, and so is an unknown one, since it may be a
misspelt one. Works on decoded JSON, without recursion; what the keywords mean is the compiler's
business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from quire.errors import InvalidParameterError

MAX_SCHEMA_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 64
"""Levels of objects and lists; what vLLM allows, and six times what OpenAI does."""
MAX_SCHEMAS = 4000
"""Subschemas. A chain of so many references takes the compiler 0.11 s and 40 MB of stack,
the worst that was found."""
MAX_PROPERTIES = 1000
"""Of one object. Properties that may be left out cost the compiler the square of their number:
1,000 of them 0.25 s."""
MAX_ENUM_VALUES = 10_000
"""In all enums together; 50,000 took the compiler 0.3 s."""
MAX_PATTERN_LEN = 4096
MAX_SAFE_INTEGER = (1 << 53) - 1
"""Larger ones are not read alike everywhere (RFC 8259, section 6)."""
_BOUNDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"}
)

_ADDITIONAL, _PATTERNS = "additionalProperties", "patternProperties"
_SUBSCHEMA = frozenset({_ADDITIONAL, "additionalItems"})
_SUBSCHEMAS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_NAMED_SUBSCHEMAS = frozenset({"properties", _PATTERNS, "$defs", "definitions"})
_ENFORCED = frozenset(
    {
        "type",
        "enum",
        "const",
        "$ref",
        "required",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "minLength",
    }
    | {
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "items",
    }
)
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
    }
    | {"$id", "discriminator"}
)
"""Say nothing about which values are valid.
A `discriminator` repeats what `oneOf` or `anyOf` demand beside it."""
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)


def checked_schema(schema: object, param: str) -> str:
    """Return the schema as JSON text, given as text or decoded.
    Raises InvalidParameterError naming what is wrong with it."""
    text, decoded = _both_forms(schema, param)
    if decoded is False:
        _refuse(param, "accepts nothing")
    num_schemas = num_values = 0
    places: dict[str, Mapping[str, Any]] = {}
    for path, depth, node in _subschemas(decoded):
        num_schemas += 1
        if depth > MAX_SCHEMA_DEPTH or num_schemas > MAX_SCHEMAS:
            _refuse(
                param,
                (
                    f"is nested more than {MAX_SCHEMA_DEPTH} deep, or has more than "
                    f"{MAX_SCHEMAS} subschemas"
                ),
            )
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            _refuse(param, f"has {type(node).__name__} at {path}, where a schema must stand")
        _check_keywords(node, path, param)
        places[path] = node
        num_values += len(node["enum"]) if isinstance(node.get("enum"), list) else 0
        if num_values > MAX_ENUM_VALUES:
            _refuse(param, f"has more than {MAX_ENUM_VALUES} values in its enums")
    endless = _endless(places)
    if endless is not None:
        _refuse(
            param,
            f"leads from {endless[:128]} back to itself whatever is chosen, by $ref and what is "
            "required, so that no value has an end",
        )
    return "{}" if decoded is True else text


def _endless(places: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return where a schema needs itself, of the schemas by their paths; None where none does. The
    compiler would take it for one that a value may yet satisfy, and an answer that has come to it
    would never be over.

    A schema has an end if what it refers to and all of its `allOf` have, and one each of its
    `anyOf` and `oneOf`, and one of the types that it allows: an object if all that it must have
    has, an array if its first items have. The least fixed point, found out from those with an end
    on; what is not certain to be needed is left out.
    """
    needs = {
        part: needed for path, node in places.items() for part, needed in _needs(path, node).items()
    }
    waits_for = {path: set(needed) for path, needed in needs.items()}
    asked_by: dict[str, list[tuple[str, str]]] = {}
    for path, needed in needs.items():
        for need, targets in needed.items():
            for target in targets:  # one that is no place could not lead back
                asked_by.setdefault(target if target in needs else "", []).append((path, need))
    ended = ["", *(path for path, needed in waits_for.items() if not needed)]
    while ended:
        for path, need in asked_by.get(ended.pop(), ()):
            if need in waits_for[path]:
                waits_for[path].discard(need)
                if not waits_for[path]:
                    ended.append(path)
    at = next((path for path, needed in waits_for.items() if needed), None)
    seen = set[str]()
    while at is not None and at not in seen:  # on to a place that comes again
        seen.add(at)
        at = needs[at][min(waits_for[at])][0]
    return None if at is None else at.removesuffix(_AS_OBJECT).removesuffix(_AS_ARRAY)


_Needs = dict[str, list[str]]
"""Needs by name, and the paths of which one must have an end to meet it; "" has one."""
_AS_OBJECT, _AS_ARRAY = " as an object", " as an array"


def _needs(path: str, node: Mapping[str, Any]) -> dict[str, _Needs]:
    """Return what a schema needs, and what it needs to be an object or an array, by their paths."""
    needs: _Needs = {}
    if isinstance(node.get("$ref"), str):
        needs["$ref"] = [node["$ref"]]
    for word in ("anyOf", "oneOf"):
        if node.get(word):
            needs[word] = [f"{path}/{word}/{number}" for number in range(len(node[word]))]
    for number in range(len(node.get("allOf", ()))):
        needs[f"allOf/{number}"] = [f"{path}/allOf/{number}"]
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or "enum" in node or "const" in node:
        return {path: needs}  # a number will do, or what is listed
    forms = {"object": _AS_OBJECT, "array": _AS_ARRAY}
    needs["type"] = [f"{path}{forms[kind]}" if kind in forms else "" for kind in map(str, kinds)]
    return {
        path: needs,
        f"{path}{_AS_OBJECT}": dict(_needs_of_object(path, node)),
        f"{path}{_AS_ARRAY}": dict(_needs_of_array(path, node)),
    }


def _needs_of_object(path: str, node: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    listed, required = node.get("properties", {}), node.get("required")
    others = [f"{path}/patternProperties/{_token(name)}" for name in node.get(_PATTERNS, ())]
    if node.get(_ADDITIONAL) is not False:
        others.append(f"{path}/additionalProperties" if _ADDITIONAL in node else "")
    names = dict.fromkeys(map(str, required)) if isinstance(required, list) else {}
    yield from (
        (f"required/{name}", [f"{path}/properties/{_token(name)}"])
        for name in names
        if name in listed
    )
    if others and names.keys() - listed.keys():
        yield "required", others
    least = node.get("minProperties")
    if isinstance(least, int) and least > 0 and (listed or others):
        yield "minProperties", [*(f"{path}/properties/{_token(name)}" for name in listed), *others]


def _needs_of_array(path: str, node: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    least = node.get("minItems")
    if not isinstance(least, int) or least < 1:
        return
    items = node.get("items")
    keyword, rest = ("items", "additionalItems") if isinstance(items, list) else ("", "items")
    first = items if isinstance(items, list) else node.get("prefixItems", [])
    for number in range(min(least, len(first))):
        yield f"items/{number}", [f"{path}/{keyword or 'prefixItems'}/{number}"]
    if least > len(first):
        yield "items", [f"{path}/{rest}" if rest in node else ""]


def _token(name: str) -> str:
    """Return a name as it stands in a path (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def closed_schema(schema: object, param: str, *, is_strict: bool) -> dict[str, Any] | bool:
    """Returns the schema with objects that hold what they declare, and nothing else. Raises
    InvalidParameterError.

    Where an object says nothing of `additionalProperties` there are none, and where an integer says
    nothing of its bounds it is one that every JSON program can read; so what the schema accepts
    afterwards, it accepted before, and a small model does not add keys and digits without end. With
    `is_strict`, as OpenAI means it, all that is declared is required too, and an object that
    declares nothing is empty. An object that says what else it may hold, a map, is left as it is;
    and so are objects that are put together (`allOf`, or `anyOf` beside `properties`), since one
    part does not know the others'.
    """
    _, decoded = _both_forms(schema, param)
    joined: set[str] = set()
    for number, (_, depth, node) in enumerate(_subschemas(decoded)):
        if number > MAX_SCHEMAS or depth > MAX_SCHEMA_DEPTH:
            return dict(decoded)  # which is for `checked_schema` to refuse
        joined.update(_joined_references(node))
    waiting: list[tuple[str, object]] = [("#", decoded)]
    while waiting:
        path, node = waiting.pop()
        if not isinstance(node, dict):
            continue
        if _is_object(node, is_strict=is_strict) and path not in joined and not _combinations(node):
            node.setdefault("additionalProperties", False)
            if is_strict and isinstance(node.get("properties"), dict):
                node["required"] = list(node["properties"])
        if node.get("type") == "integer" and not _BOUNDS & node.keys():
            node |= {"minimum": -MAX_SAFE_INTEGER, "maximum": MAX_SAFE_INTEGER}
        apart = {id(branch) for branch in _combinations(node)}
        waiting += [
            (place, child) for place, child in _children(path, node) if id(child) not in apart
        ]
    return decoded if isinstance(decoded, bool) else dict(decoded)


def _is_object(node: Mapping[str, Any], *, is_strict: bool) -> bool:
    kinds = node.get("type")
    is_named = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return "properties" in node or (is_strict and is_named)


def _combinations(node: Mapping[str, Any]) -> list[Any]:
    """Schemas that hold for the very value that another one holds for too: several of `allOf`,
    any beside `properties`."""
    branches = [
        each
        for word in ("anyOf", "oneOf", "allOf")
        if isinstance(node.get(word), list)
        for each in node[word]
    ]
    parts = node.get("allOf")
    num_parts = len(parts) if isinstance(parts, list) else 0
    is_alone = "properties" not in node and "$ref" not in node and num_parts < 2
    if "$ref" in node and "properties" in node:
        return [*branches, {"$ref": node["$ref"]}]
    return [] if is_alone else branches


def _joined_references(node: object) -> Iterator[str]:
    if isinstance(node, Mapping):
        for each in _combinations(node):
            if isinstance(each, Mapping) and isinstance(each.get("$ref"), str):
                yield each["$ref"]


def _both_forms(schema: object, param: str) -> tuple[str, Any]:
    """(text, decoded); the text is in one form, so that equal schemas are compiled once."""
    if not isinstance(schema, str | Mapping | bool):
        _refuse(param, f"must be a JSON schema (an object), not {type(schema).__name__}")
    if isinstance(schema, str) and len(schema) > MAX_SCHEMA_BYTES:
        _refuse(param, f"has more than {MAX_SCHEMA_BYTES} bytes")
    try:
        decoded = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(decoded, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        num_bytes = len(text.encode())
    except RecursionError:
        _refuse(param, f"is nested more than {MAX_SCHEMA_DEPTH} deep")
    except (TypeError, ValueError, UnicodeEncodeError):
        _refuse(param, "is not valid JSON")
    if num_bytes > MAX_SCHEMA_BYTES:
        _refuse(param, f"has more than {MAX_SCHEMA_BYTES} bytes")
    if isinstance(schema, Mapping):
        decoded = json.loads(text)  # plain dicts and lists, whatever was given
    if not isinstance(decoded, Mapping | bool):
        _refuse(param, f"must be a JSON schema (an object), not {type(decoded).__name__}")
    return text, decoded


def _subschemas(root: object) -> Iterator[tuple[str, int, object]]:
    """Yield every place where a schema stands: its path, its depth, and what is there."""
    waiting: list[tuple[str, int, object]] = [("#", 1, root)]
    while waiting:
        path, depth, node = waiting.pop()
        yield path, depth, node
        waiting += [
            (place, depth + place.count("/", len(path)), each)
            for place, each in _children(path, node)
        ]


def _children(path: str, node: object) -> Iterator[tuple[str, object]]:
    """Yield a schema's own subschemas, and their paths."""
    for keyword, value in node.items() if isinstance(node, Mapping) else ():
        place = f"{path}/{keyword}"
        if keyword in _SUBSCHEMA or (keyword == "items" and not isinstance(value, list)):
            yield place, value
        elif (keyword in _SUBSCHEMAS or keyword == "items") and isinstance(value, list):
            yield from ((f"{place}/{number}", each) for number, each in enumerate(value))
        elif keyword in _NAMED_SUBSCHEMAS and isinstance(value, Mapping):
            yield from ((f"{place}/{_token(name)}", each) for name, each in value.items())


def _check_keywords(node: Mapping[str, Any], path: str, param: str) -> None:
    for keyword, value in node.items():
        if keyword in _ANNOTATIONS:
            continue
        if keyword not in _ENFORCED | _SUBSCHEMA | _SUBSCHEMAS | _NAMED_SUBSCHEMAS:
            _refuse(
                param,
                (
                    f"has the keyword {keyword[:64]!r} at {path[:128]}, which cannot be "
                    "enforced; leave it out"
                ),
            )
        if keyword in _SUBSCHEMAS and not isinstance(value, list):
            _refuse(
                param,
                f"has {type(value).__name__} at {path[:128]}/{keyword}, where a list must stand",
            )
        if keyword in _NAMED_SUBSCHEMAS and not isinstance(value, Mapping):
            _refuse(
                param,
                f"has {type(value).__name__} at {path[:128]}/{keyword}, where an object must stand",
            )
    for keyword in ("properties", "patternProperties"):
        if len(node.get(keyword, ())) > MAX_PROPERTIES:
            _refuse(param, f"has more than {MAX_PROPERTIES} {keyword} at {path[:128]}")
    reference, form, pattern = node.get("$ref"), node.get("format"), node.get("pattern")
    if reference is not None and not (
        isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    ):
        _refuse(
            param,
            (
                f"has a $ref at {path[:128]} that does not begin with '#': nothing is fetched "
                "from elsewhere"
            ),
        )
    if form is not None and not (isinstance(form, str) and form in _FORMATS):
        _refuse(
            param,
            (
                f"has a format at {path[:128]} that cannot be enforced; those that can: "
                f"{', '.join(sorted(_FORMATS))}"
            ),
        )
    if isinstance(pattern, str) and len(pattern) > MAX_PATTERN_LEN:
        _refuse(param, f"has a pattern of more than {MAX_PATTERN_LEN} characters at {path[:128]}")


def _refuse(param: str, problem: str) -> NoReturn:
    raise InvalidParameterError(f"{param}: the schema {problem}", param=param)
