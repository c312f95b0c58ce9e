"""Turns the rules of a GBNF grammar into Lark's notation, so that they mean the same, character by
character.

The difficulty. llama.cpp reads a grammar as rules over characters. The compiler here first cuts
text into *lexemes* (regular expressions), each as long as it can be: with the lexemes `[a-z]+` and
`"b"`, the text "aab" is one lexeme, and `[a-z]+ "b"` never matches. A grammar of one-character
lexemes would be right, but far too slow. So the largest regular parts of the rules become lexemes,
and a lexeme is split again where its longest match could be wrong: where some lexeme may end before
a character that follows it somewhere, and this one could go on with the very same character.
Characters are compared by the first byte of their UTF-8 form, at which a lexer decides. Single
characters need no splitting, so this comes to an end, and every approximation errs on the side of
splitting.

All work is counted: a grammar that would need more than the limits is split into characters
throughout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from quire.errors import InvalidParameterError
from quire.grammar.endings import check_ends, reachable_from, refs_of
from quire.grammar.gbnf import (
    EMPTY,
    ROOT,
    Alt,
    Chars,
    Lexeme,
    Node,
    Ref,
    Repeat,
    Seq,
    children_of,
    parse_gbnf,
)
from quire.grammar.lexeme_conflicts import Budget, Comparison, TooMuchError, lexemes_of

MAX_ATOMS: Final = 20_000
"""Characters and classes of one lexeme, with the rules that it names written out."""
_MAX_NESTING: Final = 100
_MAX_ROUNDS: Final = 24
_MAX_WORK: Final = 300_000
"""Steps of comparing lexemes, about a microsecond each."""
_MAX_WRITTEN: Final = 1 << 20
"""Characters of the result."""


def gbnf_to_lark(text: str) -> str:
    """Returns the same grammar in Lark's notation.
    Raises InvalidParameterError with the place of a mistake."""
    rules = _Rules(parse_gbnf(text))
    if ROOT in rules.sizes:  # all of it is one regular expression
        return _written({ROOT: Lexeme(rules.nodes[ROOT])}, rules)
    split: set[Node] = set()
    budget = Budget(_MAX_WORK)
    try:
        for _ in range(_MAX_ROUNDS):
            bodies = rules.bodies(split)
            conflicts = Comparison(bodies, rules.nodes, budget).conflicts()
            if not conflicts:
                return _written(bodies, rules)
            split |= conflicts
    except TooMuchError:
        pass
    return _written(rules.bodies(None), rules)


class _Rules:
    """The rules, and which of them are regular: without recursion, but for one at either end,
    and of bounded size."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = dict(nodes)
        self.sizes: dict[str, tuple[int, int]] = {}
        """Of regular rules: (atoms, nesting)."""
        self._find_regular()
        check_ends(self.nodes, reachable_from(self.nodes, ROOT))

    def _find_regular(self) -> None:
        waiting = {name: set(refs_of(node)) for name, node in self.nodes.items()}
        users: dict[str, list[str]] = {name: [] for name in self.nodes}
        for name, refs in waiting.items():
            for ref in refs:
                users[ref].append(name)
        ready = deque(name for name, refs in waiting.items() if refs <= {name})
        while ready:
            name = ready.popleft()
            node = (
                _without_itself(name, self.nodes[name])
                if name in waiting[name]
                else self.nodes[name]
            )
            size = None if node is None else self._measure(node)
            if name in self.sizes or node is None or size is None:
                continue
            self.nodes[name], self.sizes[name] = node, size
            for user in users[name]:
                waiting[user].discard(name)
                if waiting[user] <= {user} and user not in self.sizes:
                    ready.append(user)

    def _measure(self, node: Node) -> tuple[int, int] | None:
        """(atoms, nesting) of a regular node; None for one that is not regular,
        or too large to be one lexeme."""
        if isinstance(node, Chars):
            return 1, 0
        if isinstance(node, Ref):
            size = self.sizes.get(node.name)
            return None if size is None or size[1] >= _MAX_NESTING else (size[0], size[1] + 1)
        sizes = [self._measure(child) for child in children_of(node)]
        if None in sizes:
            return None
        num_atoms = 1 + sum(size[0] for size in sizes if size)
        nesting = 1 + max((size[1] for size in sizes if size), default=0)
        return (num_atoms, nesting) if num_atoms <= MAX_ATOMS and nesting <= _MAX_NESTING else None

    def bodies(self, split: Collection[Node] | None) -> dict[str, Node]:
        """Return the rules that are more than one lexeme, cut into lexemes other than those to be
        split; None for all of them."""
        found: dict[str, Node] = {}
        waiting = [ROOT]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self._cut(self.nodes[name], split)
                waiting += refs_of(found[name])
        return found

    def _cut(self, node: Node, split: Collection[Node] | None) -> Node:
        if isinstance(node, Chars):
            return Lexeme(node)
        whole = self._lexeme(node, split)
        if whole is not None or isinstance(node, Ref):
            return whole or node
        if isinstance(node, Repeat):
            return Repeat(self._cut(node.body, split), node.low, node.high)
        if isinstance(node, Seq) and len(node.items) > 2 and self._measure(node) is not None:
            # split lexemes are halved, for as few and as long ones as will do
            middle = (len(node.items) + 1) // 2
            return Seq(
                tuple(
                    self._cut(Seq(half), split)
                    for half in (node.items[:middle], node.items[middle:])
                )
            )
        assert isinstance(node, Seq | Alt)
        parts: list[Node] = []
        for group in self._groups(node):
            joined = (
                None
                if len(group) < 2 or len(group) == len(children_of(node))
                else type(node)(tuple(group))
            )
            lexeme = None if joined is None else self._lexeme(joined, split)
            parts += [self._cut(each, split) for each in group] if lexeme is None else [lexeme]
        return type(node)(tuple(parts))

    def _lexeme(self, node: Node, split: Collection[Node] | None) -> Lexeme | None:
        if split is None or node in split or self._measure(node) is None:
            return None
        return Lexeme(node)

    def _groups(self, node: Node) -> Iterator[list[Node]]:
        """Yield a node's children, those that are regular and stand together in one list,
        within the limits."""
        group: list[Node] = []
        num_atoms = 0
        for child in children_of(node):
            size = self._measure(child)
            if group and (size is None or num_atoms + size[0] > MAX_ATOMS // 2):
                yield group
                group, num_atoms = [], 0
            if size is None:
                yield [child]
            else:
                group.append(child)
                num_atoms += size[0]
        if group:
            yield group


def _without_itself(name: str, node: Node) -> Node | None:
    """Return a rule that goes on with itself at its end, or at its beginning, as a repetition;
    None for any other recursion."""
    own: list[tuple[Node, ...]] = []
    others: list[tuple[Node, ...]] = []
    for option in _alternatives(node, name):
        items = option.items if isinstance(option, Seq) else (option,)
        (own if any(name in refs_of(item) for item in items) else others).append(items)
    for at_end in (True, False):
        steps = [
            items[:-1] if at_end else items[1:]
            for items in own
            if items[-1 if at_end else 0] == Ref(name)
        ]
        if (
            len(steps) == len(own)
            and not any(name in refs_of(Seq(step)) for step in steps)
            and others
        ):
            again = Repeat(Alt(tuple(map(Seq, steps))), 0, None)
            base = Alt(tuple(map(Seq, others)))
            return Seq((again, base) if at_end else (base, again))
    return None


def _alternatives(node: Node, name: str) -> list[Node]:
    """Return what a rule's body may be, one by one, as far as that brings the
    rule's own name to the surface."""
    if name not in refs_of(node):
        return [node]
    if isinstance(node, Alt):
        return [each for option in node.options for each in _alternatives(option, name)]
    if isinstance(node, Repeat) and (node.low, node.high) == (0, 1):
        return [*_alternatives(node.body, name), EMPTY]
    if isinstance(node, Seq) and len(node.items) == 1:
        return _alternatives(node.items[0], name)
    if isinstance(node, Seq) and name not in refs_of(Seq(node.items[:-1])):
        tails = _alternatives(node.items[-1], name)
        return [
            Seq((*node.items[:-1], *(tail.items if isinstance(tail, Seq) else (tail,))))
            for tail in tails
        ]
    return [node]


# Writing it down.


def _written(bodies: Mapping[str, Node], rules: _Rules) -> str:
    names = {name: f"rule_{number}" for number, name in enumerate(bodies)}
    lexemes = dict.fromkeys(lexeme.node for body in bodies.values() for lexeme in lexemes_of(body))
    terminals: dict[Node, str] = {}
    lines = [f"start: {names[ROOT]}"]
    num_chars = 0
    for number, node in enumerate(lexemes):
        terminals[node], line = _terminal(f"LEXEME_{number}", node, rules)
        lines += [line] if line else []
        num_chars += len(line)
        if num_chars > _MAX_WRITTEN:
            message = "the grammar is too large with the rules that it names written out"
            raise InvalidParameterError(
                f"structured_outputs: {message}", param="structured_outputs"
            )
    lines += [f"{names[name]}: {_rule(body, names, terminals)}" for name, body in bodies.items()]
    return "\n".join(lines)


def _terminal(name: str, node: Node, rules: _Rules) -> tuple[str, str]:
    """Return how a lexeme is named in rules, and its own line. The compiler's lexemes are never
    empty."""
    pattern = _pattern(node, rules)
    if not pattern:
        return '""', ""
    if _pattern_is_nullable(node, rules):
        return f"{name}?", f"{name}: /{pattern}/ & /(?s:.+)/"
    return name, f"{name}: /{pattern}/"


def _pattern_is_nullable(node: Node, rules: _Rules) -> bool:
    if isinstance(node, Ref):
        return _pattern_is_nullable(rules.nodes[node.name], rules)
    if isinstance(node, Chars):
        return False
    if isinstance(node, Alt):
        return any(_pattern_is_nullable(option, rules) for option in node.options)
    if isinstance(node, Repeat) and node.low == 0:
        return True
    return all(_pattern_is_nullable(child, rules) for child in children_of(node))


def _pattern(node: Node, rules: _Rules) -> str:
    """Return the regular expression, in which only letters, digits and `_` stand for themselves."""
    if isinstance(node, Chars):
        (low, high), *others = node.ranges
        if low == high and not others:
            return _escaped(low)
        return "[" + "".join(_class_range(*each) for each in node.ranges) + "]"
    if isinstance(node, Ref):
        return _pattern(rules.nodes[node.name], rules)
    if isinstance(node, Seq):
        return "".join(_pattern(item, rules) for item in node.items)
    if isinstance(node, Alt):
        return "(?:" + "|".join(_pattern(option, rules) for option in node.options) + ")"
    assert isinstance(node, Repeat)
    body = _pattern(node.body, rules)
    return f"(?:{body}){_count(node)}" if body and node.high != 0 else ""


def _class_range(low: int, high: int) -> str:
    """Return a part of a class, without surrogates, which no text holds."""
    if low < 0xD800 <= high or low <= 0xDFFF < high:
        return _class_range(low, 0xD7FF) * (low < 0xD800) + _class_range(0xE000, high) * (
            high > 0xDFFF
        )
    return _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"


def _escaped(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and (char.isalnum() or char == "_") else f"\\x{{{code:x}}}"


def _count(node: Repeat) -> str:
    signs: dict[tuple[int, int | None], str] = {
        (0, None): "*",
        (1, None): "+",
        (0, 1): "?",
        (1, 1): "",
    }
    high = "" if node.high is None else node.high
    return signs.get((node.low, node.high), f"{{{node.low},{high}}}")


def _rule(node: Node, names: Mapping[str, str], terminals: Mapping[Node, str]) -> str:
    if isinstance(node, Lexeme):
        return terminals[node.node]
    if isinstance(node, Ref):
        return names[node.name]
    if isinstance(node, Repeat):
        return '""' if node.high == 0 else f"({_rule(node.body, names, terminals)}){_count(node)}"
    between = " " if isinstance(node, Seq) else " | "
    return (
        "("
        + (between.join(_rule(child, names, terminals) for child in children_of(node)) or '""')
        + ")"
    )
