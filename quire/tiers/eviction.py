"""Which stored blocks go first: those whose removal is likely to cost the least computing.

A block is read again the sooner, the more recently it was used; for reuse distances with a heavy
tail, the rate falls as the inverse of the distance (Blankstein, Sen, Freedman 2017, "Hyperbolic
Caching", which weighs it by the cost of a miss as well). So what is stored is worth its cost of
computing, over the number of uses of others since its own. And a block is found only behind all
before it, so that it is worth no less than those that continue it.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import NamedTuple


class Standing(NamedTuple):
    """What a segment's place in the order depends on."""

    cost: float
    """Of computing one of its records, on average; above zero, in any unit."""
    distance: int
    """Uses of segments since its own last one, which counts as well: at least 1."""
    continued: frozenset[int]
    """Segments with records that its own continue."""


def least_worth_first(standings: Mapping[int, Standing]) -> list[int]:
    """Return segments, which are numbered as they were begun, in the order in which they are
    removed."""
    own = {number: each.cost / each.distance for number, each in standings.items()}
    worth: dict[int, float] = {}
    for first in sorted(own, key=own.__getitem__, reverse=True):
        reached = [first]
        while reached:
            number = reached.pop()
            if number not in worth and number in own:
                worth[number] = own[first]
                reached += standings[number].continued
    return sorted(own, key=lambda number: (worth[number], -number))


class LeavesFirst:
    """Order of stored blocks, each of which is found only behind its parent: those that no other
    continues are removed first, the one that was used least recently before the others."""

    def __init__(self) -> None:
        self._used: dict[bytes, int] = {}
        """When each was last used, counted in uses."""
        self._parents: dict[bytes, bytes] = {}
        self._num_children: dict[bytes, int] = {}
        """Of those that have any, whether they are stored or not."""
        self._leaves: list[tuple[int, bytes]] = []
        """A heap of (last use, digest); others than `_used` says are outdated."""
        self._num_uses = 0

    def add(self, digest: bytes, parent: bytes) -> None:
        """Note one that is stored from now on, and was not."""
        self._parents[digest] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self.use(digest)

    def use(self, digest: bytes) -> None:
        """Note a use."""
        self._num_uses += 1
        self._used[digest] = self._num_uses
        self._push(digest)
        if len(self._leaves) > 2 * len(self._used) + 64:
            self._leaves.clear()
            for each in self._used:
                self._push(each)

    def remove(self, digest: bytes) -> None:
        """Note that one is not stored any more."""
        del self._used[digest]
        parent = self._parents.pop(digest)
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._used:
                self._push(parent)

    def first(self) -> bytes:
        """Return which is to be removed first, of at least one."""
        while self._used.get(self._leaves[0][1]) != self._leaves[0][0] or self._has_children(
            self._leaves[0][1]
        ):
            heappop(self._leaves)
        return self._leaves[0][1]

    def _has_children(self, digest: bytes) -> bool:
        return digest in self._num_children

    def _push(self, digest: bytes) -> None:
        if not self._has_children(digest):
            heappush(self._leaves, (self._used[digest], digest))
