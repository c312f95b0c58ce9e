"""Where the n-grams of a text of tokens ended last, for a few n (prompt lookup; Saxena, "Prompt
Lookup Decoding", 2023).

Owns the text. An n-gram is found by its hash, and its place is verified token by token, back to
where the match begins: so a few sizes find matches of any length. A token costs a quarter of a
microsecond and 110 bytes for each size, where several are taken in at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

Match = tuple[int, int]
"""Length of a match, and the place of its last token in the text; (0, -1) for none."""
NO_MATCH: Match = (0, -1)
MAX_LENGTH = 64
"""Longer matches count as that long."""
_STRETCH = 16


class NgramIndex:
    """A text that grows. Matches are as long as the shortest of `sizes` at least, and as `most`
    at most."""

    def __init__(self, sizes: Collection[int], most: int = MAX_LENGTH) -> None:
        self.token_ids: list[int] = []
        self._most = most
        self._ends: dict[int, dict[int, int]] = {size: {} for size in sorted(sizes, reverse=True)}
        """By size: the place where the n-gram of a hash ended last."""
        self._num_indexed = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens, which are not -1."""
        self.token_ids += token_ids

    def index(self, end: int) -> None:
        """Have all n-grams found that end before the place `end`."""
        first, self._num_indexed = self._num_indexed, end
        for size, ends in self._ends.items():
            start = max(first, size - 1)
            if start + 1 == end:  # the usual case
                ends[hash(tuple(self.token_ids[end - size : end]))] = start
            elif start < end:
                window = self.token_ids[start - size + 1 : end]
                grams = zip(*(window[place:] for place in range(size)), strict=False)
                ends.update(zip(map(hash, grams), range(start, end), strict=True))

    def find(self, tail: list[int], hint: int = -1) -> Match:
        """Find the end of another text here: a long match with it, the latest of its n-gram.

        `hint` is a place that is tried as well: where an earlier match goes on.
        """
        text, most = self.token_ids, self._most
        best = NO_MATCH
        if 0 <= hint < self._num_indexed:
            length = _common(text, hint, tail, most)
            if length >= min(self._ends):
                best = (length, hint)
        for size, ends in self._ends.items():
            if len(tail) < size:
                continue
            end = ends.get(hash(tuple(tail[-size:])), -1)
            if end >= 0 and end != hint:
                length = _common(text, end, tail, most)
                if length > best[0] and length >= size:
                    best = (length, end)
            if best[0] >= size:
                break
        return best


def _common(text: list[int], end: int, tail: list[int], most: int) -> int:
    """How many tokens up to the place `end` are those at the end of `tail`."""
    most = min(most, end + 1, len(tail))
    behind, length = len(tail) - end - 1, 0
    start = end + 1
    while (
        length + _STRETCH <= most
        and text[start - _STRETCH : start] == tail[behind + start - _STRETCH : behind + start]
    ):
        length += _STRETCH
        start -= _STRETCH
    while length < most and text[start - 1] == tail[behind + start - 1]:
        length += 1
        start -= 1
    return length
