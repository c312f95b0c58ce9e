"""All that has occurred in a text of tokens: a suffix automaton that grows token by token.

Owns the text and its automaton (Blumer et al., "The smallest automaton recognizing the subwords of
a text", 1985): the states are the sets of substrings that end at the same places, a state's link
leads to its longest suffix that ends at more places. A token takes amortised constant time. The
first edge of a state lies in an array, as most states have one alone: about 100 bytes a token.
"""

from __future__ import annotations

from array import array

_NONE = -1


class SuffixAutomaton:
    """Implements `TextIndex` over matches of any length."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._last = 0
        self._match = (0, _NONE)
        # By state: length of its longest substring, link, a place where it ends, its first edge.
        self._lengths, self._links = array("i", [0]), array("i", [_NONE])
        self._ends = array("i", [_NONE])
        self._tokens, self._targets = array("q", [_NONE]), array("i", [_NONE])
        self._others: dict[int, dict[int, int]] = {}
        """Of states with more than one edge: the further ones."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def match(self) -> tuple[int, int]:
        """Length of the longest suffix of the text that occurred before, and the place of the last
        token of such an occurrence, the latest that was looked at; (0, -1) where none did."""
        return self._match

    def append(self, token_id: int) -> None:
        """Add a token, which must not be -1, and find what its end has in common with the past."""
        place, state, lengths, links = len(self.token_ids), self._last, self._lengths, self._links
        self.token_ids.append(token_id)
        new = self._last = self._add(lengths[state] + 1, place)
        target = _NONE
        while state != _NONE and (target := self._follow(state, token_id)) == _NONE:
            self._set_edge(state, token_id, new)
            state = links[state]
        if state == _NONE:
            links[new] = 0
            self._match = (0, _NONE)
            return
        if lengths[target] > lengths[state] + 1:
            target = self._split(state, token_id, target)
        links[new] = target
        self._match = (lengths[target], self._ends[target])
        self._ends[target] = place

    def advance(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """Follow another text by a token: the state of the longest suffix of it that occurs here,
        and its length, as the last call for that text returned them; both begin as 0.

        The automaton may have grown since.
        """
        lengths, links = self._lengths, self._links
        while state and length <= lengths[links[state]]:  # the state was split
            state = links[state]
        while (target := self._follow(state, token_id)) == _NONE:
            if not state:
                return 0, 0
            state = links[state]
            length = lengths[state]
        return target, length + 1

    def end_of(self, state: int) -> int:
        """The place of the last token of an occurrence of a state's substrings."""
        return self._ends[state]

    def _follow(self, state: int, token_id: int) -> int:
        if self._tokens[state] == token_id:
            return self._targets[state]
        others = self._others.get(state)
        return _NONE if others is None else others.get(token_id, _NONE)

    def _set_edge(self, state: int, token_id: int, target: int) -> None:
        if self._tokens[state] in (_NONE, token_id):
            self._tokens[state], self._targets[state] = token_id, target
        else:
            self._others.setdefault(state, {})[token_id] = target

    def _add(self, length: int, end: int) -> int:
        self._lengths.append(length)
        self._links.append(_NONE)
        self._ends.append(end)
        self._tokens.append(_NONE)
        self._targets.append(_NONE)
        return len(self._lengths) - 1

    def _split(self, state: int, token_id: int, target: int) -> int:
        """Give the shorter substrings of `target`, which end at more places from now on, a state of
        their own."""
        clone = self._add(self._lengths[state] + 1, self._ends[target])
        self._links[clone], self._links[target] = self._links[target], clone
        self._tokens[clone], self._targets[clone] = self._tokens[target], self._targets[target]
        if target in self._others:
            self._others[clone] = self._others[target].copy()
        while state != _NONE and self._follow(state, token_id) == target:
            self._set_edge(state, token_id, clone)
            state = self._links[state]
        return clone
