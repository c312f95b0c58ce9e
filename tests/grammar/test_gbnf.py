"""GBNF grammars mean what llama.cpp says, character by character:
judged by trying every short text."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Set
from typing import Any

import pytest

from quire.core.grammars import Grammar
from quire.core.structure import StructuredOutputsParams
from quire.errors import InvalidParameterError
from quire.grammar.backend import NativeVocabulary, Vocabulary, compile_grammar
from quire.grammar.gbnf import Alt, Chars, Node, Ref, Repeat, Seq, parse_gbnf
from quire.grammar.judge import GrammarJudge
from quire.grammar.lexemes import gbnf_to_lark

BYTES = NativeVocabulary(
    Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], frozenset({256}), (256,))
)

JSON = r"""
root   ::= object   # an object, and nothing behind it
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
)? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= ([ \t\n] ws)?
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
LIST = (
    'root ::= item+\n\n# no line breaks within\nitem ::= "- " '
    '[^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"'
)
CHESS = """
root   ::= "1. " move " " move "\\n" ([1-9] [0-9]? ". " move " " move "\\n")+
move   ::= (pawn | piece | castle) [+#]?
piece  ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
LANGUAGE = """
root ::= declaration*
declaration ::= type name "(" (type name)? ")" "{" statement* "}"
type ::= ("int" | "float") ws
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement ::= type name ws "=" ws expr ";" | "return" ws expr ";" | "if" "(" expr ("<=" | "<") expr ")" "{" statement* "}"
expr ::= factor (("+" | "-") factor)*
factor ::= name | [0-9]+ | "-" factor | name "(" (expr ("," ws expr)*)? ")" | "(" ws expr ws ")"
ws ::= [ \\t\\n]+
"""


def matcher(grammar: str) -> Callable[[str], bool]:
    """Whether the compiled grammar takes a whole text."""
    compiled: Any = compile_grammar(Grammar("gbnf", grammar), BYTES)

    def accepts(text: str) -> bool:
        at, data = compiled.deep_copy(), list(text.encode())
        return bool(at.try_consume_tokens(data) == len(data) and at.is_accepting())

    return accepts


def oracle(grammar: str) -> Callable[[str], bool]:
    """The same by the definition: where each rule can end, as a least fixed point."""
    rules = parse_gbnf(grammar)

    def accepts(text: str) -> bool:
        ends: dict[tuple[str, int], set[int]] = {("root", 0): set()}

        def go(node: Node, place: int) -> Set[int]:
            if isinstance(node, Chars):
                is_there = place < len(text) and any(
                    low <= ord(text[place]) <= high for low, high in node.ranges
                )
                return {place + 1} if is_there else set()
            if isinstance(node, Ref):
                return set(ends.setdefault((node.name, place), set()))
            if isinstance(node, Alt):
                return {end for option in node.options for end in go(option, place)}
            places, found = {place}, {place}
            if isinstance(node, Seq):
                for item in node.items:
                    places = {end for each in places for end in go(item, each)}
                return places
            assert isinstance(node, Repeat)
            found = {place} if node.low == 0 else set()
            for number in range(
                1, len(text) + node.low + 2 if node.high is None else node.high + 1
            ):
                places = {end for each in places for end in go(node.body, each)}
                found |= places if number >= node.low else set()
            return found

        while True:
            before = {key: len(value) for key, value in ends.items()}
            for name, place in list(ends):
                ends[name, place] |= go(rules[name], place)
            if before == {key: len(value) for key, value in ends.items()}:
                return len(text) in ends["root", 0]

    return accepts


def texts(alphabet: str, max_len: int) -> list[str]:
    return [
        "".join(chars)
        for length in range(max_len + 1)
        for chars in itertools.product(alphabet, repeat=length)
    ]


@pytest.mark.parametrize(
    ("grammar", "alphabet", "max_len"),
    [
        ('root ::= "a" | "b"', "ab", 2),
        ('root ::= [a-c]+ "b"', "abcd", 4),  # the longest match of [a-c]+ would leave no "b"
        ('root ::= e\ne ::= "(" e ")" | [ab]+ | e "a"', "ab()", 5),
        ('root ::= x "a"\nx ::= "(" x ")" | [ab]*', "ab()", 5),
        ('root ::= x x\nx ::= "ab" | "a" | "b" x', "ab", 6),
        ('root ::= "a"{2,3} ("b" root)?', "ab", 7),
        ('root ::= ("a" | root "b" root)? "c"', "abc", 6),
        ('root ::= "a"{,2} [^a]{1,} "a"{2}', "ab", 6),
        # characters that share their first byte
        ('root ::= "é" x | "è"\nx ::= [è]* ("é" x)? [ê]', "éèê", 5),
        ("root ::= 'it''s' | . [\\]\\-\\^] .?", "a]-^\n", 3),
        (ARITHMETIC, "a=\n(", 5),
        (LIST, "- a\n", 6),
    ],
)
def test_every_short_text_is_judged_as_by_the_definition(
    grammar: str, alphabet: str, max_len: int
) -> None:
    accepts, expected = matcher(grammar), oracle(grammar)
    judged = {text: accepts(text) for text in texts(alphabet, max_len)}
    assert judged == {text: expected(text) for text in judged}
    assert any(judged.values())


def _expression(chance: random.Random, depth: int, names: list[str]) -> str:
    kind = chance.random()
    if depth == 0 or kind < 0.25:
        return chance.choice(['"a"', '"b"', '"ab"', "[ab]", "[^a]", '"ba"', '""'])
    if kind < 0.45:
        return chance.choice(names)
    parts = [_expression(chance, depth - 1, names) for _ in range(2)]
    if kind < 0.65:
        return f"({parts[0]}){chance.choice(['*', '+', '?', '{2}', '{1,2}', '{0,1}', '{2,}'])}"
    return " ".join(parts) if kind < 0.85 else f"({' | '.join(parts)})"


def test_so_are_grammars_drawn_by_chance() -> None:
    chance = random.Random(7)
    num_good = 0
    for _ in range(50):
        names = ["root", "x", "y"][: chance.randint(1, 3)]
        grammar = "\n".join(f"{name} ::= {_expression(chance, 3, names)}" for name in names)
        try:
            accepts, expected = matcher(grammar), oracle(grammar)
        except InvalidParameterError as error:
            assert "come to an end" in str(error), grammar
            continue
        num_good += 1
        wrong = [text for text in texts("ab", 5) if accepts(text) != expected(text)]
        assert not wrong, grammar
    assert num_good > 25


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            JSON,
            ['{"a": [1, -2.5e1, "x\\u00e9é"],\n\n "b": {}}  \n', "{}"],
            ['{"a" 1}', '{"a":01}', "[]", '{"a":1'],
        ),
        (ARITHMETIC, ["a = b\n", "(a+12)*c=3\n", "x=y\n\n(z)=1 \n"], ["x\n=y", "a=b"]),
        (LIST, ["- a b\n- ü\n"], ["-a\n", "- a"]),
        (
            CHESS,
            ["1. e4 e5\n2. Nbxd7+ O-O-O#\n10. exd8=Q Kb1\n"],
            ["1. e4 e5\n", "1. e9 e5\n2. e4 e5\n"],
        ),
        (
            LANGUAGE,
            ["int f(int x){if(g(x, 1)<=-2){return x;}}", "", "int intf(){return ifx;}"],
            ["intf(){}", "int f(){x}"],
        ),
    ],
)
def test_well_known_shapes(grammar: str, good: list[str], bad: list[str]) -> None:
    accepts, expected = matcher(grammar), oracle(grammar)
    assert (
        [accepts(text) for text in good] == [True] * len(good) == [expected(text) for text in good]
    )
    assert [accepts(text) for text in bad] == [False] * len(bad) == [expected(text) for text in bad]


def test_the_dialect_is_seen_by_the_first_rule() -> None:
    def kind(grammar: str) -> str:
        return StructuredOutputsParams(grammar=grammar).wire.kind

    assert (
        kind('root ::= "a" | "b"')
        == kind('# of letters\n\n a-b.c::=\n"a"\nroot ::= a-b.c')
        == "gbnf"
    )
    assert (
        kind('start: "::="')
        == kind('// root ::= "a"\nstart: /x ::= y/')
        == kind('?start: a\na: "x"')
        == "lark"
    )


@pytest.mark.parametrize(
    ("grammar", "where", "what"),
    [
        ('root ::= "a" b', "line 1, column 14", "no rule 'b'"),
        ('root ::= "a"\nx ::= [b-', "line 2, column 7", "not closed"),
        ('root ::= "a\n"', "line 1, column 10", "not closed"),
        ('root ::= ("a"', "line 1, column 10", "not closed"),
        ('root ::= "a")', "line 1, column 13", "closes nothing"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1", "twice"),
        ('x ::= "a"', "line 1, column 1", "no rule 'root'"),
        ("root ::= *", "line 1, column 10", "nothing stands before"),
        ('root ::= "a"{3,2}', "line 1, column 13", "smaller to a larger"),
        ('root ::= "a"{99999}', "line 1, column 13", "10000"),
        ('root ::= "a"{x}', "line 1, column 13", "{m,n}"),
        ('root ::= "\\q"', "line 1, column 11", "no escape"),
        ('root ::= "\\uD800"', "line 1, column 11", "no such character"),
        ('root ::= "\\x4"', "line 1, column 11", "hexadecimal"),
        ("root ::= [z-a]", "line 1, column 11", "smaller to a larger"),
        ("root ::= []", "line 1, column 10", "no character"),
        ("root ::= <[10]>", "line 1, column 10", "Lark's has"),
        ("root ::= " + "(" * 80 + '"a"' + ")" * 80, "line 1, column 74", "nested"),
        ('root ::= "a" x\nx ::= "b" x', "", "'x' of the grammar can never come to an end"),
    ],
)
def test_a_mistake_is_named_with_its_place(grammar: str, where: str, what: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        GrammarJudge().check(StructuredOutputsParams(grammar=grammar).wire)
    assert where in str(caught.value) and what in str(caught.value)


@pytest.mark.slow_except("doubling", "counts", "optional", "stars")
@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= r0\nr4000 ::= "a"\n' + "\n".join(f"r{n} ::= r{n + 1}" for n in range(4000)),
        'root ::= r0\nr60 ::= "a"\n' + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60)),
        pytest.param(
            "root ::= " + " | ".join(f'"w{n}" root "e{n}"' for n in range(2000)) + ' | "z"',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            'root ::= "(" root ")" | "x"'
            + "".join(f' | b "{chr(0x4E00 + n)}" root' for n in range(2000))
            + "\nb ::= "
            + '"abcd" ' * 999,
            marks=pytest.mark.slow,
        ),
        'root ::= ((("a"{0,1000}){0,1000}){0,1000}) ("(" root ")")?',
        "root ::= " + '"a"? ' * 9000 + '("(" root ")")?',
        "root ::= " + " ".join(f"[^{chr(0x4E00 + n)}]*" for n in range(3000)) + ' ("(" root ")")?',
        'root ::= "a"' + "*" * 60_000,
    ],
    ids=["chain", "doubling", "words", "combinations", "counts", "optional", "classes", "stars"],
)
def test_the_work_is_bounded(grammar: str) -> None:
    began_s = time.thread_time()
    try:
        written = gbnf_to_lark(grammar)
    except InvalidParameterError:
        written = ""
    assert time.thread_time() - began_s < 10  # of processor time; as a rule, less than one
    assert len(written) < 3 << 20
