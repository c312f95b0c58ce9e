"""Stop strings in streamed text: found in any chunking, never leaked.

Owns the automaton of all stop strings of a request and one integer of state per sequence. Never
sees tokens, and never uses regular expressions: the work is linear in the text, whatever the stop
strings are.

Which stop string wins: the one that is *complete first* as the text grows, because generation ends
there; among those complete at the same character, the longest, so that no part of it is shown. The
result depends on the text only, not on how it was cut into pieces. The reference is `cut_at_stop`.

Aho and Corasick, "Efficient string matching" (CACM 18(6), 1975).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from quire.errors import InvalidParameterError

_ROOT: Final = 0


def cut_at_stop(
    text: str, stop: tuple[str, ...], *, include_stop_str: bool
) -> tuple[str, str | None]:
    """Return the text up to its first stop string and that stop string: the plain,
    quadratic definition of this module."""
    ends = [(text.find(each) + len(each), -len(each), each) for each in stop if each in text]
    if not ends:
        return text, None
    end, _, winner = min(ends)
    return text[: end if include_stop_str else end - len(winner)], winner


class _Automaton:
    """The trie of the stop strings with failure links; immutable once built, shared by forks.

    A node is an integer. Its text is `owner[node][:depth[node]]`. `longest[node]` is the longest
    stop string that ends when the node is reached, or None.
    """

    __slots__ = ("children", "depth", "failure", "longest", "owner")

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.failure: list[int] = [_ROOT]
        self.depth: list[int] = [0]
        self.owner: list[str] = [""]
        self.longest: list[str | None] = [None]
        for each in stop:
            self._add(each)
        self._link()

    def _add(self, word: str) -> None:
        node = _ROOT
        for depth, char in enumerate(word, start=1):
            following = self.children[node].get(char)
            if following is None:
                following = len(self.depth)
                self.children[node][char] = following
                self.children.append({})
                self.failure.append(_ROOT)
                self.depth.append(depth)
                self.owner.append(word)
                self.longest.append(None)
            node = following
        self.longest[node] = word

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix of a
        node's text that is a node too."""
        queue = deque(self.children[_ROOT].values())
        while queue:
            node = queue.popleft()
            if self.longest[node] is None:
                self.longest[node] = self.longest[self.failure[node]]
            for char, child in self.children[node].items():
                self.failure[child] = self.step(self.failure[node], char)
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """Return the longest suffix of (the node's text + char) that begins a stop string."""
        children, failure = self.children, self.failure
        while node != _ROOT and char not in children[node]:
            node = failure[node]
        return children[node].get(char, _ROOT)


class StopStrings:
    """All stop strings of a request: read when the first text comes, for all answers to it."""

    __slots__ = ("_include_stop_str", "_matcher", "stop")

    def __init__(self, stop: tuple[str, ...] = (), *, include_stop_str: bool = False) -> None:
        self.stop = stop
        self._include_stop_str = include_stop_str
        self._matcher: StopMatcher | None = None

    def matcher(self) -> StopMatcher | None:
        """Return a matcher for one answer from its beginning; None without stop strings."""
        if not self.stop:
            return None
        if self._matcher is None:
            self._matcher = StopMatcher(self.stop, include_stop_str=self._include_stop_str)
        return self._matcher.copy()


class StopMatcher:
    """Streams text through, up to a stop string.

    The text held back is always the beginning of some stop string, hence shorter than the longest
    of them, and empty with `include_stop_str`, where even a complete stop string is output. Raises
    InvalidParameterError for an empty one.
    """

    __slots__ = ("_automaton", "_include_stop_str", "_matched", "_node")

    def __init__(self, stop: tuple[str, ...], *, include_stop_str: bool = False) -> None:
        if "" in stop:
            raise InvalidParameterError(
                'stop must not contain the empty string ""; remove it', param="stop"
            )
        self._automaton = _Automaton(stop)
        self._include_stop_str = include_stop_str
        self._node = _ROOT
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return self._matched

    @property
    def num_held(self) -> int:
        """How many characters are held back."""
        is_open = self._matched is None and not self._include_stop_str
        return self._automaton.depth[self._node] if is_open else 0

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next text; give what is safe to show and the stop string that ended it, if one
        has.

        After a match nothing more is emitted. Amortised O(len(text)).
        """
        if self._matched is not None:
            return "", self._matched
        automaton, node = self._automaton, self._node
        step, longest = automaton.step, automaton.longest
        num_held = self.num_held
        for index, char in enumerate(text, start=1):
            node = step(node, char)
            matched = longest[node]
            if matched is not None:
                self._matched = matched
                num_hidden = 0 if self._include_stop_str else len(matched)
                return self._release(num_held, text, num_held + index - num_hidden), matched
        num_kept = 0 if self._include_stop_str else automaton.depth[node]
        emit = self._release(num_held, text, num_held + len(text) - num_kept)
        self._node = node
        return emit, None

    def flush(self) -> str:
        """Return the text held back, which turned out to be no stop string, at the end of the
        text."""
        held = self._release(self.num_held, "", self.num_held)
        self._node = _ROOT
        return held

    def copy(self) -> StopMatcher:
        """Return an independent matcher in the same state, for a fork of the sequence; O(1)."""
        fork = object.__new__(StopMatcher)
        for name in StopMatcher.__slots__:
            setattr(fork, name, getattr(self, name))
        return fork

    def _release(self, num_held: int, text: str, num_released: int) -> str:
        """Return the first `num_released` characters of (held text + text). The held text is the
        current node's, not stored.
        """
        if num_released <= num_held:
            return self._automaton.owner[self._node][:num_released]
        return self._automaton.owner[self._node][:num_held] + text[: num_released - num_held]
