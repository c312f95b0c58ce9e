"""Reads grammars in llama.cpp's notation (GBNF), which vLLM's users know as EBNF:
`root ::= "a" | [b-z]+`.

Owns the syntax, its limits, and error messages with line and column. What a grammar's parts become
is the business of `lexemes`. Accepts a superset of both dialects: a rule may go on over several
lines in either, and names may hold `_`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

from quire.errors import InvalidParameterError

MAX_CODEPOINT: Final = 0x10FFFF
MAX_DEPTH: Final = 64
"""Of parentheses."""
MAX_COUNT: Final = 10_000
"""Of a repetition; llama.cpp stops at 2,000."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of these code points: ranges with both ends, sorted,
    apart from one another."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; empty for the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times, without end where `high` is None."""

    body: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """A rule, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A part that is matched as a whole, by one regular expression; the parser makes none."""

    node: Node


Node: TypeAlias = Chars | Seq | Alt | Repeat | Ref | Lexeme
EMPTY: Final = Seq(())
ROOT: Final = "root"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_HEAD = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.\-]*)[ \t\r\n]*::=")
_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)+")
_COUNTS = re.compile(r"\{[ \t]*(\d{0,9})[ \t]*(,?)[ \t]*(\d{0,9})[ \t]*\}")
_HEX_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_ESCAPES: Final = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "0": "\0",
    "f": "\f",
    "v": "\v",
    "b": "\b",
    "a": "\a",
}


def parse_gbnf(text: str) -> dict[str, Node]:
    """Returns the rules by name. Raises InvalidParameterError with the line
    and column of what is wrong."""
    return _GbnfParser(text).rules()


class _GbnfParser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._refs: dict[str, int] = {}
        """Names that are referred to, and where first."""

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip_space()
        while self._at < len(self._text):
            head = _HEAD.match(self._text, self._at)
            if head is None:
                self._fail("a rule must stand here: name ::= ...")
            if head[1] in found:
                self._fail(f"the rule {head[1][:64]!r} is defined twice")
            self._at = head.end()
            self._skip_space()
            found[head[1]] = self._alternatives(0)
            if self._peek() == ")":
                self._fail("this ) closes nothing")
        for name, place in self._refs.items():
            if name not in found:
                self._fail(f"there is no rule {name[:64]!r}", place)
        if ROOT not in found:
            self._fail(f"there is no rule {ROOT!r}, which is where an answer begins", 0)
        return found

    def _alternatives(self, depth: int) -> Node:
        options = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            self._skip_space()
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (char := self._peek()) not in ("", "|", ")") and not _HEAD.match(
            self._text, self._at
        ):
            if char in "*+?{":
                self._fail(f"nothing stands before this {char}")
            items.append(self._repeated(self._item(char, depth)))
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _item(self, char: str, depth: int) -> Node:
        start = self._at
        if char in "\"'":
            return self._literal(char)
        if char == "[":
            return self._char_class()
        if char == ".":
            self._at += 1
            return Chars(((0, MAX_CODEPOINT),))
        if char == "(":
            return self._group(depth)
        name = _NAME.match(self._text, start)
        if name is None:
            what = (
                "tokens cannot be named in this notation (Lark's has <[id]>)"
                if char in "<!"
                else "not expected here"
            )
            self._fail(f"{char!r}: {what}")
        self._at = name.end()
        self._refs.setdefault(name[0], start)
        return Ref(name[0])

    def _group(self, depth: int) -> Node:
        start = self._at
        if depth >= MAX_DEPTH:
            self._fail(f"parentheses are nested more than {MAX_DEPTH} deep")
        self._at += 1
        self._skip_space()
        inner = self._alternatives(depth + 1)
        if self._peek() != ")":
            self._fail("this ( is not closed", start)
        self._at += 1
        return inner

    def _repeated(self, node: Node) -> Node:
        start, num_signs = self._at, 0
        while (char := self._peek()) in ("*", "+", "?", "{") and char:
            num_signs += 1
            if num_signs > MAX_DEPTH:
                self._fail(f"more than {MAX_DEPTH} repetitions of one thing", start)
            low, high = self._counts() if char == "{" else _SIGNS[char]
            node = Repeat(node, low, high)
            self._at += char != "{"
        return node

    def _counts(self) -> tuple[int, int | None]:
        found = _COUNTS.match(self._text, self._at)
        if found is None or not (found[1] or found[3]):
            self._fail("a repetition is written {m}, {m,}, {,n} or {m,n}")
        low = int(found[1] or 0)
        high = int(found[3]) if found[3] else None if found[2] else low
        if max(low, high or 0) > MAX_COUNT or (high is not None and high < low):
            self._fail(f"a repetition goes from a smaller to a larger number, up to {MAX_COUNT}")
        self._at = found.end()
        return low, high

    def _literal(self, quote: str) -> Node:
        start = self._at
        self._at += 1
        chars: list[Node] = []
        while self._raw() != quote:
            if not self._raw() or self._raw() == "\n":
                self._fail("this text is not closed", start)
            code = self._char()
            chars.append(Chars(((code, code),)))
        self._at += 1
        return chars[0] if len(chars) == 1 else Seq(tuple(chars))

    def _char_class(self) -> Node:
        start = self._at
        self._at += 1
        is_inverted = self._raw() == "^"
        self._at += is_inverted
        ranges: list[tuple[int, int]] = []
        while self._raw() != "]":
            if not self._raw():
                self._fail("this [ is not closed", start)
            ranges.append(self._range())
        self._at += 1
        merged = _merged(ranges)
        chars = Chars(tuple(_inverted(merged)) if is_inverted else tuple(merged))
        if not ranges or not chars.ranges:
            self._fail("no character is of this class", start)
        return chars

    def _range(self) -> tuple[int, int]:
        start, low = self._at, self._char()
        if self._raw() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return low, low
        self._at += 1
        high = self._char()
        if high < low:
            self._fail("a range goes from a smaller to a larger character", start)
        return low, high

    def _char(self) -> int:
        """Reads one character of a text or a class, which may be escaped."""
        start, char = self._at, self._raw()
        self._at += 1
        if char != "\\":
            return ord(char)
        escape = self._raw()
        self._at += 1
        length = _HEX_LENGTHS.get(escape)
        if length is None:
            if not escape or (escape.isalnum() and escape not in _ESCAPES):
                self._fail(f"there is no escape \\{escape}", start)
            return ord(_ESCAPES.get(escape, escape))
        digits = self._text[self._at : self._at + length]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{length}}}", digits):
            self._fail(f"\\{escape} needs {length} hexadecimal digits", start)
        self._at += length
        if int(digits, 16) > MAX_CODEPOINT or 0xD800 <= int(digits, 16) < 0xE000:
            self._fail("there is no such character", start)
        return int(digits, 16)

    def _raw(self) -> str:
        return self._text[self._at : self._at + 1]

    def _peek(self) -> str:
        """Return the next character that is no white space and no comment; "" at the end."""
        self._skip_space()
        return self._raw()

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        if space is not None:
            self._at = space.end()

    def _fail(self, problem: str, place: int | None = None) -> NoReturn:
        before = self._text[: self._at if place is None else place]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        where = f"line {line}, column {column}"
        raise InvalidParameterError(
            f"structured_outputs: {where} of the grammar: {problem}", param="structured_outputs"
        )


_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _inverted(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = 0
    for low, high in ranges:
        if low > start:
            yield start, low - 1
        start = high + 1
    if start <= MAX_CODEPOINT:
        yield start, MAX_CODEPOINT


def children_of(node: Node) -> tuple[Node, ...]:
    """Return the parts of a sequence, alternation or repetition."""
    if isinstance(node, Seq):
        return node.items
    if isinstance(node, Alt):
        return node.options
    return (node.body,) if isinstance(node, Repeat) else ()
