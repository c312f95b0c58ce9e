"""The n-grams of a text of tokens, each with the place where it ended last (prompt lookup; Saxena,
"Prompt Lookup Decoding", 2023)."""

from __future__ import annotations


class NgramIndex:
    """Implements `TextIndex` over matches of `least` to `most` tokens."""

    def __init__(self, least: int, most: int) -> None:
        self.token_ids: list[int] = []
        self.match = (0, -1)
        """As `SuffixAutomaton.match`, of matches of those lengths."""
        self._sizes = range(least, most + 1)
        self._ends: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        """Add a token, and find the longest n-gram at the end that occurred before."""
        token_ids, ends = self.token_ids, self._ends
        place = len(token_ids)
        token_ids.append(token_id)
        found = (0, -1)
        for size in self._sizes:
            if size > place + 1:
                break
            key = tuple(token_ids[-size:])
            end = ends.get(key, -1)
            ends[key] = place
            if end >= 0:
                found = (size, end)
        self.match = found
