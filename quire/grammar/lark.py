"""Reads as much of Lark's notation, as the compiler has it, as tells how its rules refer to each
other. What is wrong with a grammar is the compiler's to say: this reads grammars that it has taken.

Conditions and parameters of rules are passed over, as if each could be met; so a rule that cannot
end here cannot end at all. A grammar that is not understood is not judged.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from quire.grammar.endings import refs_of
from quire.grammar.gbnf import EMPTY, Alt, Chars, Node, Ref, Repeat, Seq

START: Final = "start"
_ANY: Final = Chars(((0, 0x10FFFF),))
"""In place of a terminal: every one is thought to have an end."""
_MAX_DEPTH: Final = 100
_TOKENS = re.compile(
    r"""(?P<space>(?:[ \t]|\#[^\n]*|//[^\n]*)+)
    |(?P<newline>(?:\r?\n)+[ \t]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<word>%[a-z]+)
    |(?P<special><[^<>\s]+>|@[A-Za-z0-9_\-]+)
    |(?P<number>0[xX][0-9a-fA-F]+|[+-]?[0-9]+)
    |(?P<rule>!?[_?]?[a-z][_a-z0-9\-]*)
    |(?P<terminal>_?[A-Z][_A-Z0-9\-]*)
    |(?P<sign>->|::|\.\.|[:,.{}()\[\]~&=_|+*?])""",
    re.VERBOSE,
)
_ENDS = frozenset({"|", "->", "}", ")", "]", "%if", ""})
_COUNTS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Token(NamedTuple):
    """A word of the notation."""

    kind: str
    text: str
    start: int


class LarkRules(NamedTuple):
    """A grammar's rules by name; those of a grammar within it have a number and a slash
    before theirs."""

    nodes: dict[str, Node]
    patterns: dict[str, str]
    """What rules are made of besides rules (names of terminals, regular expressions), each with the
    definitions that it may need."""


class UnknownNotationError(Exception):
    """There is something that this does not know."""


def parse_lark(text: str) -> LarkRules:
    """Return the rules. Raises UnknownNotationError where they are not understood."""
    return _Parser(text).rules()


class _Scope(NamedTuple):
    """A grammar, perhaps within another one."""

    prefix: str
    patterns: dict[str, None]
    definitions: list[str]


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._num_scopes = 0
        self._found = LarkRules({}, {})

    def rules(self) -> LarkRules:
        self._grammar()
        if self._peek().text:
            raise UnknownNotationError
        nodes = self._found.nodes
        for name in [ref for node in nodes.values() for ref in refs_of(node)]:
            nodes.setdefault(name, _ANY)  # one that is imported
        return self._found

    def _grammar(self) -> str:
        """Read a grammar, up to the brace that ends it; return the name of its first rule."""
        scope = _Scope(f"{self._num_scopes}/" * (self._num_scopes > 0), {}, [])
        self._num_scopes += 1
        while (token := self._peek(is_new_line=True)).text not in ("", "}"):
            if token.kind == "rule":
                self._next()
                self._skip_head()
                self._found.nodes[scope.prefix + token.text.lstrip("!?")] = self._options(scope)
            elif token.kind == "terminal":
                scope.definitions.append(self._skip_line())
            else:
                self._skip_line()
        defined = "\n".join(scope.definitions)
        self._found.patterns.update((pattern, defined) for pattern in scope.patterns)
        return scope.prefix + START

    def _options(self, scope: _Scope) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnknownNotationError
        options = [self._sequence(scope)]
        while self._skips_bar():
            options.append(self._sequence(scope))
        self._depth -= 1
        return Alt(tuple(options))

    def _sequence(self, scope: _Scope) -> Node:
        items: list[Node] = []
        while (token := self._peek()).text not in _ENDS and token.kind != "newline":
            items.append(self._repeated(self._item(self._next(), scope)))
        while (token := self._peek()).text in ("%if", "->"):  # a condition, or another name
            self._next()
            while (token := self._peek()).text not in _ENDS and token.kind != "newline":
                self._next()
                self._skip_brackets(token)
        return Seq(tuple(items))

    def _item(self, token: Token, scope: _Scope) -> Node:
        if token.text in ("(", "["):
            inner = self._options(scope)
            if self._next().text != {"(": ")", "[": "]"}[token.text]:
                raise UnknownNotationError
            return inner if token.text == "(" else Alt((inner, EMPTY))
        if token.kind == "rule":
            self._skip_parameter()
            return Ref(scope.prefix + token.text.lstrip("!?"))
        if token.text == "%lark":
            if self._next().text != "{":
                raise UnknownNotationError
            start = self._grammar()
            if self._next().text != "}":
                raise UnknownNotationError
            return Ref(start)
        if token.text in ("%json", "%regex"):
            self._skip_json()
        elif token.kind in ("regex", "terminal"):
            scope.patterns[token.text] = None
        elif token.kind == "string" and self._peek().text == "..":
            self._next()
            self._next()
        elif token.kind not in ("string", "special"):
            raise UnknownNotationError
        return _ANY

    def _repeated(self, node: Node) -> Node:
        token = self._peek()
        if token.text in _COUNTS:
            self._next()
            return Repeat(node, *_COUNTS[token.text])
        if token.text == "~":
            self._next()
            low = self._number(self._next())
            if self._peek().text == "..":
                self._next()
                self._number(self._next())
            return Repeat(node, low, None)
        if token.text == "{":
            self._next()
            first = self._next()
            while self._next().text not in ("}", ""):
                pass
            return Repeat(node, 0 if first.text == "," else self._number(first), None)
        return node

    @staticmethod
    def _number(token: Token) -> int:
        if token.kind != "number":
            raise UnknownNotationError
        return int(token.text, 0)

    # -- words
    # ----------------------------------------------------------------------------------------------

    def _peek(self, *, is_new_line: bool = False) -> Token:
        """Return the next word, which may be a newline unless these are to be skipped."""
        at = self._at
        token = self._next()
        while is_new_line and token.kind == "newline":
            at = self._at
            token = self._next()
        self._at = at
        return token

    def _next(self) -> Token:
        while self._at < len(self._text):
            found = _TOKENS.match(self._text, self._at)
            if found is None or found.lastgroup is None:
                raise UnknownNotationError
            self._at = found.end()
            if found.lastgroup != "space":
                return Token(found.lastgroup, found[0], found.start())
        return Token("end", "", self._at)

    def _skips_bar(self) -> bool:
        """Pass over a bar, which may begin a line; whether there was one."""
        if self._peek(is_new_line=True).text != "|":
            return False
        while self._next().text != "|":
            pass
        return True

    def _skip_head(self) -> None:
        """Pass over what stands between a rule's name and its body."""
        while (token := self._next()).text != ":":
            if token.kind in ("newline", "end"):
                raise UnknownNotationError
            self._skip_brackets(token)

    def _skip_line(self) -> str:
        """Pass over a definition or a statement; return it."""
        start = self._peek(is_new_line=True).start
        while True:
            while (token := self._peek()).kind not in ("newline", "end") and token.text != "}":
                self._next()
                if token.text in ("%json", "%regex", "%llguidance"):
                    self._skip_json()
                self._skip_brackets(token)
            end = self._at
            if not self._skips_bar():
                return self._text[start:end]

    def _skip_parameter(self) -> None:
        """Pass over what a rule is given: `::_` or `::incr(_)`."""
        if self._peek().text == "::":
            self._next()
            token = self._next()
            if token.kind == "rule" and self._text[self._at : self._at + 1] == "(":
                token = self._next()
            self._skip_brackets(token)

    def _skip_brackets(self, opening: Token) -> None:
        """Pass over all up to what closes this bracket, if it is one."""
        depth = int(opening.text in ("(", "[", "{"))
        while depth:
            token = self._next()
            if token.kind == "end":
                raise UnknownNotationError
            depth += (token.text in ("(", "[", "{")) - (token.text in (")", "]", "}"))

    def _skip_json(self) -> None:
        start = _BLANKS.match(self._text, self._at)
        try:
            _, self._at = _DECODER.raw_decode(self._text, start.end() if start else self._at)
        except (ValueError, RecursionError):
            raise UnknownNotationError from None


_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
