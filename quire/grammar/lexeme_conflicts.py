"""Finds the lexemes of a grammar whose longest match could be wrong, by running the automata of all
lexemes side by side.

Compares characters by the first byte of their UTF-8 form. All work is counted against a budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from quire.grammar.gbnf import Alt, Chars, Lexeme, Node, Ref, Repeat, Seq, children_of

_LEADS: Final = ((0x80, 0, 0), (0x800, 6, 0xC0), (0x10000, 12, 0xE0), (0x110000, 18, 0xF0))
"""UTF-8: the end of a range of code points, and how their first byte is made."""


class TooMuchError(Exception):
    """The budget is spent."""


class Budget:
    """Counts steps of work; TooMuchError past the limit."""

    def __init__(self, num_steps: int) -> None:
        self._num_left = num_steps

    def spend(self) -> None:
        """Take one step off."""
        self._num_left -= 1
        if self._num_left < 0:
            raise TooMuchError


class Comparison:
    """The automata of all lexemes, run side by side as if each could come anywhere.

    `bodies` are the rules with their lexemes cut out, `nodes` the rules that lexemes name.
    """

    def __init__(
        self, bodies: Mapping[str, Node], nodes: Mapping[str, Node], budget: Budget
    ) -> None:
        self._bodies, self._nodes, self._budget = bodies, nodes, budget
        self._lexemes = list(
            dict.fromkeys(lexeme.node for body in bodies.values() for lexeme in lexemes_of(body))
        )
        self._classes = _Classes(self._atoms())
        self._moves: list[list[tuple[int, int]]] = []
        """Of each state of all automata: (classes of characters, next state)."""
        self._jumps: list[list[int]] = []
        self._owners: list[int] = []
        self._ends: dict[int, int] = {}
        self._starts = [
            self._build_lexeme(number, node) for number, node in enumerate(self._lexemes)
        ]
        self._numbers = {node: number for number, node in enumerate(self._lexemes)}

    def conflicts(self) -> set[Node]:
        """Return the lexemes to be split: one could go on where another may end."""
        follow = self._follow()
        found: set[int] = set()
        start = self._closed(self._starts)
        waiting, seen = [start], {start}
        while waiting:
            states = waiting.pop()
            ended = 0  # first bytes that may follow a lexeme that can end here
            for state in states if states is not start else ():
                if state in self._ends:
                    ended |= follow[self._ends[state]]
            for cls, targets in self._targets(states).items():
                if ended & self._classes.leads[cls]:
                    found |= {self._owners[target] for target in targets}
                after = self._closed(targets)
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return {
            node for node in map(self._lexemes.__getitem__, found) if not isinstance(node, Chars)
        }

    def _targets(self, states: Collection[int]) -> dict[int, set[int]]:
        """Return where each class of characters leads."""
        found: dict[int, set[int]] = {}
        for state in states:
            for mask, target in self._moves[state]:
                while mask:
                    self._budget.spend()
                    cls = (mask & -mask).bit_length() - 1
                    found.setdefault(cls, set()).add(target)
                    mask &= mask - 1
        return found

    def _closed(self, states: Collection[int]) -> frozenset[int]:
        found, waiting = set(states), list(states)
        while waiting:
            for state in self._jumps[waiting.pop()]:
                self._budget.spend()
                if state not in found:
                    found.add(state)
                    waiting.append(state)
        return frozenset(found)

    def _atoms(self) -> set[Chars]:
        found: set[Chars] = set()
        waiting, seen = list(self._lexemes), set()
        while waiting:
            self._budget.spend()
            node = waiting.pop()
            if isinstance(node, Chars):
                found.add(node)
            elif isinstance(node, Ref) and node.name not in seen:
                seen.add(node.name)
                waiting.append(self._nodes[node.name])
            elif not isinstance(node, Ref):
                waiting += children_of(node)
        return found

    def _build_lexeme(self, number: int, node: Node) -> int:
        start, end = self._state(number), self._state(number)
        self._build(node, start, end, number)
        self._ends[end] = number
        return start

    def _state(self, owner: int) -> int:
        self._budget.spend()
        self._moves.append([])
        self._jumps.append([])
        self._owners.append(owner)
        return len(self._owners) - 1

    def _build(self, node: Node, start: int, end: int, owner: int) -> None:
        """Build an automaton from `start` to `end`. Repetitions count to two at most,
        which only makes it accept more."""
        self._budget.spend()
        if isinstance(node, Chars):
            self._moves[start].append((self._classes.mask(node), end))
        elif isinstance(node, Ref):
            self._build(self._nodes[node.name], start, end, owner)
        elif isinstance(node, Alt):
            for option in node.options:
                self._build(option, start, end, owner)
        elif isinstance(node, Seq):
            for item in node.items:
                middle = self._state(owner)
                self._build(item, start, middle, owner)
                start = middle
            self._jumps[start].append(end)
        elif isinstance(node, Repeat):
            first, last = self._state(owner), self._state(owner)
            self._jumps[start].append(first)
            self._build(node.body, first, last, owner)
            self._jumps[last].append(end)
            if node.low == 0:
                self._jumps[start].append(end)
            if node.high is None or node.high > 1:
                self._jumps[last].append(first)

    def _follow(self) -> list[int]:
        """Return the first bytes of what may follow each lexeme."""
        nullable, first = self._beginnings()
        after_rule = dict.fromkeys(self._bodies, 0)
        after_lexeme = [0] * len(self._lexemes)

        def visit(node: Node, after: int) -> None:
            self._budget.spend()
            if isinstance(node, Lexeme):
                after_lexeme[self._numbers[node.node]] |= after
            elif isinstance(node, Ref):
                after_rule[node.name] |= after
            elif isinstance(node, Repeat):
                again = node.high is None or node.high > 1
                visit(node.body, after | (_first(node.body, first, nullable) if again else 0))
            elif isinstance(node, Alt):
                for option in node.options:
                    visit(option, after)
            elif isinstance(node, Seq):
                for item in reversed(node.items):
                    visit(item, after)
                    after = _first(item, first, nullable) | (
                        after if _is_nullable(item, nullable) else 0
                    )

        while True:
            before = dict(after_rule)
            for name, body in self._bodies.items():
                visit(body, after_rule[name])
            if after_rule == before:
                return after_lexeme

    def _beginnings(self) -> tuple[set[Any], dict[Any, int]]:
        """Return which lexemes and rules may be empty, and the first bytes of each; rules by name,
        lexemes by node."""
        nullable: set[Any] = set()
        first: dict[Any, int] = {}
        for number, node in enumerate(self._lexemes):
            begun = self._closed([self._starts[number]])
            first[node] = self._classes.leads_of(
                mask for state in begun for mask, _ in self._moves[state]
            )
            if any(state in self._ends for state in begun):
                nullable.add(node)
        first |= dict.fromkeys(self._bodies, 0)
        has_changed = True
        while has_changed:
            has_changed = False
            for name, body in reversed(list(self._bodies.items())):
                self._budget.spend()
                found = first[name] | _first(body, first, nullable)
                if found != first[name] or (name not in nullable and _is_nullable(body, nullable)):
                    has_changed = True
                    first[name] = found
                    nullable |= {name} if _is_nullable(body, nullable) else set()
        return nullable, first


class _Classes:
    """Characters that no atom tells apart, as numbers, and the first bytes of each such class."""

    def __init__(self, atoms: Collection[Chars]) -> None:
        bounds = {edge for atom in atoms for low, high in atom.ranges for edge in (low, high + 1)}
        bounds |= {end for end, _, _ in _LEADS}
        edges = sorted(bounds)
        self._numbers = {low: number for number, low in enumerate(edges)}
        self.leads = [_lead_bytes(low, high - 1) for low, high in pairwise(edges)]

    def mask(self, atom: Chars) -> int:
        """Return the classes of an atom, as bits."""
        found = 0
        for low, high in atom.ranges:
            first, end = self._numbers[low], self._numbers[high + 1]
            found |= (1 << end) - (1 << first)
        return found

    def leads_of(self, masks: Iterator[int]) -> int:
        """Return the first bytes of all classes in these masks."""
        every = 0
        for mask in masks:
            every |= mask
        found = 0
        while every:
            found |= self.leads[(every & -every).bit_length() - 1]
            every &= every - 1
        return found


def _lead_bytes(low: int, high: int) -> int:
    found, start = 0, 0
    for end, shift, base in _LEADS:
        first, last = max(low, start), min(high, end - 1)
        if first <= last:
            found |= (2 << (base + (last >> shift))) - (1 << (base + (first >> shift)))
        start = end
    return found


def lexemes_of(node: Node) -> Iterator[Lexeme]:
    """Yield the lexemes of a rule's body."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Lexeme):
            yield node
        waiting += children_of(node)


def _is_nullable(node: Node, nullable: Collection[Any]) -> bool:
    if isinstance(node, Lexeme | Ref):
        return (node.node if isinstance(node, Lexeme) else node.name) in nullable
    if isinstance(node, Alt):
        return any(_is_nullable(option, nullable) for option in node.options)
    if isinstance(node, Repeat):
        return node.low == 0 or _is_nullable(node.body, nullable)
    return all(_is_nullable(item, nullable) for item in children_of(node))


def _first(node: Node, first: Mapping[Any, int], nullable: Collection[Any]) -> int:
    if isinstance(node, Lexeme | Ref):
        return first[node.node if isinstance(node, Lexeme) else node.name]
    found = 0
    for child in children_of(node):
        found |= _first(child, first, nullable)
        if isinstance(node, Seq) and not _is_nullable(child, nullable):
            break
    return found
