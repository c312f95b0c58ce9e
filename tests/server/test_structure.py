"""T11: two hundred hostile grammars and schemas: each is answered in time,
and never with an answer of another form."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served import children, cpu_s
from servers import RunningServer
from timing import timed

from quire.grammar import judge as judge_module
from quire.grammar import trial as trial_module

pytestmark = pytest.mark.slow

LIMIT_S = 4.0
"""Of processor time: a second on trial, as much in the engine, and what surrounds them."""
Case = tuple[str, Any]


def _doubling(kind: str, depth: int) -> dict[str, Any]:
    """Definitions each of which names the next one twice: 2 ** depth ways through."""
    definitions: dict[str, Any] = {
        f"d{n}": {kind: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)
    }
    return {
        "$ref": "#/$defs/d0",
        "$defs": {**definitions, f"d{depth}": {"type": "string", "maxLength": 2}},
    }


def _product(width: int) -> dict[str, Any]:
    """All combinations of one branch of each."""
    schema: dict[str, Any] = {"type": "object"}
    for n in range(width):
        branches = [
            {"properties": {f"x{n}": {"type": "string"}}},
            {"properties": {f"y{n}": {"type": "integer"}}},
        ]
        schema = {"allOf": [schema, {"anyOf": branches}]}
    return schema


def _chain(length: int) -> dict[str, Any]:
    definitions = {
        f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(length)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{length}": {"type": "null"}}}


def _nested(opening: str, closing: str, depth: int, middle: str = "{}") -> str:
    return opening * depth + middle + closing * depth


def _schemas() -> Iterator[Any]:
    yield from (
        _doubling(kind, depth) for kind in ("anyOf", "allOf", "oneOf") for depth in (4, 16, 24, 28)
    )
    yield from (_product(width) for width in (2, 6, 12, 20, 28))
    yield from (_chain(length) for length in (10, 300, 1900, 3000, 10_000))
    yield from (_nested('{"items":', "}", depth) for depth in (10, 60, 70, 500, 5000, 60_000))
    yield from (_nested('{"anyOf":[', "]}", depth) for depth in (10, 30, 40, 400, 60_000))
    yield from (
        {"enum": [f"value {n}" for n in range(count)]} for count in (1, 100, 9999, 10_001, 100_000)
    )
    for count in (10, 500, 1001, 5000):
        properties = {f"p{n}": {"type": "string", "maxLength": 1} for n in range(count)}
        yield {"type": "object", "properties": properties}
        yield {"type": "object", "properties": properties, "required": list(properties)}
    yield from (
        {"type": "string", "maxLength": most, "minLength": most // 2}
        for most in (10, 10**4, 10**6, 10**9, 10**18)
    )
    yield from (
        {"type": "array", "items": {"type": "null"}, "minItems": n}
        for n in (10**2, 10**4, 10**6, 10**12, -1, 1.5)
    )
    yield from ({"type": "number", "multipleOf": n} for n in (3, 1e-9, 1e-300, 0, -1, 10**30))
    yield from (
        {"type": "integer", "minimum": -(10**n), "maximum": 10**n} for n in (1, 5, 18, 30, 300)
    )
    for pattern in (
        "^(a+)+$",
        "^(a|a)*b$",
        "(.*a){30}",
        "^(a{1000}){1000}$",
        "(?=a)b",
        r"(\w+\s?)+$",
        "[",
        "(" * 2000,
        "a" * 5000,
    ):
        yield {"type": "string", "pattern": pattern}
        yield {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    yield from (
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/nowhere"},
    )
    yield {"allOf": [{"$ref": "#"}]}
    yield {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    yield {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    yield from ({"type": "object", "description": "x" * n} for n in (10**5, 10**6, 7 * 10**6))
    yield from (
        {"x-guidance": {"lenient": True}, "type": "null"},
        {"type": ["null", 5]},
        {"type": None},
        {"required": [1]},
    )
    yield from (
        {"properties": {"\x00": {}}},
        {"const": "\U0001f600" * 1000},
        {"type": "object", "minProperties": 10**9},
    )
    yield from (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": n}}} for n in range(count)]}
        for count in (3, 60, 600)
    )


def _regexes() -> Iterator[str]:
    yield from (
        "(a+)+b",
        "(a|aa)+$",
        "(.*a){50}",
        "(.*a.*b.*c){20}",
        "([ab]*a[ab]{14})",
        "(a{1000}){1000}",
        "((a{99}){99}){99}",
    )
    yield from (
        "[a-z]{1,100000}",
        "(x?){5000}x{5000}",
        r"\p{L}{1,500}",
        r"(\p{L}|\p{N})*\p{Lu}{300}",
        "(?i)" + "abc" * 3000,
    )
    yield from (
        "(" * 240 + "a" + ")" * 240,
        "(" * 9000 + "a" + ")" * 9000,
        "." * 30_000,
        "a" * 40_000,
        "[" * 500,
        "a**",
        "(?R)",
    )
    yield from (
        r"(a)\1",
        "(?<=a)b",
        "a{5,1}",
        "a{99999999999999999999}",
        "|".join(f"w{n}" for n in range(5000)),
        "\\",
        "(?#x)",
    )
    yield from (f"(a|b){{{n},{2 * n}}}c*" for n in (10, 1000, 10**5, 10**7))
    yield from (
        f"{lead}({body}){{{count}}}{tail}"
        for lead in ("", "x*")
        for body in ("a|b*", ".*", r"\w+", "[^a]*a")
        for count in ("2,", "50", "0,3000")
        for tail in ("", "y+")
    )


def _grammars() -> Iterator[str]:
    yield from (
        'start: start start | "a" | ""',
        'start: a a a a a a a a\na: "x"* | a a',
        "start: start",
        "start: a\na: b\nb: a",
    )
    yield from ("start: " + "(" * n + '"a"' + ")" * n for n in (10, 100, 3000, 100_000))
    yield from (
        'start: ("a" "b"){1,1000000}',
        'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"',
        "start: /(.*a){30}/",
        "nothing",
        "",
    )
    yield from (
        "start: " + " | ".join(f'"w{n}"' for n in range(count)) for count in (1000, 20_000, 60_000)
    )
    yield from (
        '%import "x"\nstart: /a/',
        'start: %json {"not": {}}',
        "start: <[0]>",
        "start: <|im_end|>",
        'start: "\\ud800"',
    )
    yield "\n".join([*(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)), 'r60: "x"', "start: r0"])
    yield "\n".join([*(f'r{n}: r{n + 1} | "y"' for n in range(6000)), 'r6000: "x"', "start: r0"])


def _cases() -> list[Case]:
    cases: list[Case] = [("guided_json", schema) for schema in _schemas()]
    cases += [("guided_regex", regex) for regex in _regexes()]
    cases += [("guided_grammar", grammar) for grammar in _grammars()]
    return cases


def test_there_are_enough_cases() -> None:
    assert len(_cases()) >= 170


def _spent_s() -> float:
    """Processor time of this process, in which the server is, and of those that it started."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = time.process_time() + ended.ru_utime + ended.ru_stime
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended since
            spent_s += cpu_s(pid)
    return spent_s


@timed
def test_t11_hostile_grammars_are_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain requests beside them, whose pauses are watched."""
    for module in (judge_module, trial_module):
        monkeypatch.setattr(module, "MAX_WAIT_S", 60.0)
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    statuses: list[int] = []

    async def main() -> float:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            beside = asyncio.create_task(_watch(client))
            for field, value in _cases():
                body = {"prompt": "Once", "max_tokens": 2, field: value}
                before_s = _spent_s()
                response = await client.post("/v1/completions", json=body)
                spent_s = _spent_s() - before_s
                assert spent_s < LIMIT_S, (field, str(value)[:80], spent_s)
                assert response.status_code in (200, 400, 413), (
                    field,
                    str(value)[:80],
                    response.text[:300],
                )
                statuses.append(response.status_code)
            beside.cancel()
            return (await asyncio.gather(beside, return_exceptions=True)) and longest[0]

    longest = [0.0]

    async def _watch(client: httpx.AsyncClient) -> None:
        while True:
            began_s, spent_s = time.monotonic(), time.process_time()
            assert (await client.get("/livez")).status_code == 200
            # what a busy machine takes from the server is none of its doing
            wait_s = min(time.monotonic() - began_s, time.process_time() - spent_s)
            longest[0] = max(longest[0], wait_s)
            await asyncio.sleep(0.01)

    assert asyncio.run(main()) < 1.0
    assert statuses.count(200) > 30 and statuses.count(400) > 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mib < 700
    assert len(judge_module.judge._verdicts) <= judge_module.MAX_VERDICTS
