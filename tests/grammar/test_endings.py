"""Grammars in Lark's notation whose rules can never come to an end are refused with the rule's
name, and no other is."""

from __future__ import annotations

import random

import pytest

from quire.core.grammars import Grammar
from quire.core.structure import StructuredOutputsParams
from quire.errors import InvalidParameterError
from quire.grammar.backend import _check_lark
from quire.grammar.judge import GrammarJudge
from quire.grammar.lark import UnknownNotationError, parse_lark

JUDGE = GrammarJudge()


def _check(grammar: str) -> None:
    JUDGE.check(StructuredOutputsParams(grammar=grammar).wire)


ENDLESS = {
    "left": ("x", 'start: x\nx: x "b"'),
    "right": ("x", 'start: "a" x\nx: "b" x'),
    "itself": ("x", 'start: "a" | x\nx: x'),
    "indirect": ("y", 'start: "a" | x\nx: "b" y\ny: (x "c")+'),
    "one of two": ("x", 'start: "a" (x | y)\nx: "c" x\ny: "d"'),
    "optional": ("x", 'start: "a" ["b" x]\nx: "c" (x | "e" x) "d"?'),
    "counted": ("x", 'start: "a"~3 x{0,3}\nx: "c" x{2,}'),
    "tildes": ("y", 'start: "a"~1..3 x?\nx: "b" | "c" y\ny: x~0..2 y'),
    "lines": ("b", 'start: a // one\n\na: b\n  | "d" b\nb: "x" a'),
    "modifiers": ("x", '?start: "a" -> foo\n | "b" x\n!x: "c" x -> bar'),
    "within": ("x", 'start: "a" %lark {\n  start: "b" x\n  x: "c" x\n}'),
    "beside": ("x", 'start: "a" %lark {\n  start: x\n  x: "c"\n} x\nx: "d" x'),
    "parameters": (
        "p",
        'start: p::0x0\np::_ : "b" p::incr(_) %if bit_count_lt(_, 3)\n | "b" p::_',
    ),
    "attributes": ("x", 'start[capture="q"]: "a" x\nx: <[1-2]> "a".."z" /b"/ x'),
    "schema of words": ("x", 'start: x\nx: %regex {"substring_words": "a } x: | ("} x'),
}


@pytest.mark.parametrize(("rule", "grammar"), ENDLESS.values(), ids=ENDLESS)
def test_a_rule_that_never_ends_is_named(rule: str, grammar: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"the rule '{rule}' .* come to an end"):
        _check(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: x\nx: x "b" | "a"',
        'start: "a" ["b" x]\nx: "c" (x | "d")',
        'start: x\nx: "b" x?',
        'start: x\nx: "b" x{0,2} x~0 x*',
        'start: x\nx: "b" x{,2}',
        '%ignore / +/\n%import common.INT\nstart: e\ne: t | e "+" t\nt: INT | "(" e ")"',
        'start: p::0x0\np::_ : "b" p::incr(_) %if bit_count_lt(_, 3)\n | "c"',
        'start: "a" %lark {\n  start: "b" x\n  x: "c" x | "d"\n} x\nx: "d"',
        'start: /[^\\s"]+/ T\nT: /a|b/ & ~/a/',
        "start: T\nT: U+\nU: /x/ | /y/",
    ],
)
def test_a_rule_that_can_end_passes(grammar: str) -> None:
    parse_lark(grammar)  # it is understood
    _check(grammar)


@pytest.mark.parametrize(
    ("pattern", "grammar"),
    [
        ("X", 'start: "a" X\nX: /a/ & /b/'),
        ("T", 'start: "q" | T\nT: U "x"\nU: /a/ & ~/a|b/'),
        (r"/\[\^\\s\\S\]/", 'start: "q" /[^\\s\\S]/'),
    ],
)
def test_a_pattern_that_matches_nothing_is_named(pattern: str, grammar: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"no text matches {pattern} of"):
        _check(grammar)


def test_one_of_many_patterns_that_matches_nothing_is_named() -> None:
    patterns = [f"/a{number}[^\\s]/ & ~/b/" for number in range(40)]

    def grammar() -> str:
        lines = [f"T{number}: {pattern}" for number, pattern in enumerate(patterns)]
        return (
            "start: ("
            + " | ".join(f"T{number}" for number in range(40))
            + ")*\n"
            + "\n".join(lines)
        )

    _check(grammar())
    patterns[37] = "/a/ & /b/"
    with pytest.raises(InvalidParameterError, match="no text matches T37 of"):
        _check(grammar())


def test_a_regular_expression_that_matches_nothing_is_refused() -> None:
    for regex in ("[^\\s\\S]", "a[^\\s\\S]", "(a|b)[^\\d\\D]c"):
        with pytest.raises(InvalidParameterError, match="no text satisfies"):
            JUDGE.check(StructuredOutputsParams(regex=regex).wire)
    JUDGE.check(StructuredOutputsParams(regex="a([^\\s\\S]|b)").wire)


def test_schemas_within_generated_grammars_are_passed_over() -> None:
    text = 'start: "<" t ">"\nt: %json {"enum": ["} x: y", 1]} t | %json {"type": "null"}'
    assert set(parse_lark(text).nodes) == {"start", "t"}
    JUDGE.check(Grammar("lark", text))


@pytest.mark.parametrize(
    "text", ["start: $", "start: (", "start x", "start: %json {", "start: [a)"]
)
def test_what_is_not_understood_is_left_to_the_compiler(text: str) -> None:
    with pytest.raises(UnknownNotationError):
        parse_lark(text)
    _check_lark(text)
    _check_lark("start: " + "(" * 500 + '"a"' + ")" * 500)


def test_the_same_rules_as_by_counting_the_shortest_texts() -> None:
    rng = random.Random(5)
    num_endless = 0
    for _ in range(400):
        names = ["start", *"abcd"]
        rules = {
            name: [
                [rng.choice([*names, '"t"', '"u"']) for _ in range(rng.randint(1, 3))]
                for _ in range(rng.randint(1, 2))
            ]
            for name in names
        }
        text = "\n".join(
            f"{name}: {' | '.join(' '.join(option) for option in options)}"
            for name, options in rules.items()
        )
        expected = not _all_end(rules)
        num_endless += expected
        try:
            _check_lark(text)
            found = False
        except InvalidParameterError:
            found = True
        assert found == expected, text
    assert 50 < num_endless < 350


def _all_end(rules: dict[str, list[list[str]]]) -> bool:
    """Whether each rule that `start` leads to has a text of so many characters, by dynamic
    programming over heights of its trees."""
    shortest: dict[str, float] = dict.fromkeys(rules, float("inf"))
    for _ in range(len(rules) + 1):
        for name, options in rules.items():
            shortest[name] = min(
                sum(shortest.get(symbol, 1) for symbol in option) for option in options
            )
    reached: set[str] = set()
    waiting = ["start"]
    while waiting:
        name = waiting.pop()
        if name in rules and name not in reached:
            reached.add(name)
            waiting += [symbol for option in rules[name] for symbol in option]
    return all(shortest[name] < float("inf") for name in reached)
