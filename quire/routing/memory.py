"""What a replica's prefix cache should hold, as far as the router has sent it there.

A guess, bounded like the cache it stands for: the chunks that were used least recently go first.
Of a prompt, the chunks at its end are older than those at its beginning, as in the cache itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMemory:
    """Digests of one replica, at most `max_chunks` (about 100 bytes each)."""

    __slots__ = ("_chunks", "_max_chunks")

    def __init__(self, max_chunks: int) -> None:
        assert max_chunks >= 1
        self._max_chunks = max_chunks
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def match(self, chunks: Sequence[int]) -> int:
        """Return how many chunks of a prompt's beginning are known."""
        known = self._chunks
        for number, digest in enumerate(chunks):
            if digest not in known:
                return number
        return len(chunks)

    def add(self, chunks: Sequence[int]) -> None:
        """Note a prompt that was sent there."""
        known = self._chunks
        for digest in reversed(chunks):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._max_chunks:
            known.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the replica was replaced."""
        self._chunks.clear()
