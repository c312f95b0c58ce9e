"""The order of one tenant's records of one kind: enough to page through them without reading any
that is not shown.

Owns names, numbers and tags in memory, nothing on disk. Numbers only grow, whatever the clock of
the machine does, so "newest first" is the order in which records came. Where a record was is
remembered for a while when it is gone: who deletes a list part by part names a deleted one for the
next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

MAX_DROPPED = 10_000
"""Records whose places are remembered."""


class RecordIndex:
    """Records by id: each has a number, by which they are ordered, and a tag,
    by which lists are narrowed."""

    def __init__(self) -> None:
        self._tags: dict[str, str] = {}
        """In ascending order of numbers."""
        self._numbers: dict[str, int] = {}
        """Also of those that were dropped, for a while."""
        self._dropped: deque[str] = deque()
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._tags)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._tags

    def add(self, record_id: str, tag: str, number: int | None = None) -> int:
        """Enter a record as the newest; its number,
        which may be given where it is greater than all before."""
        assert record_id not in self._tags
        self._last_number = max(self._last_number + 1, number or 0)
        self._tags[record_id] = tag
        self._numbers[record_id] = self._last_number
        return self._last_number

    def set_tag(self, record_id: str, tag: str) -> None:
        """Replace a record's tag. It must be there."""
        assert record_id in self._tags
        self._tags[record_id] = tag

    def drop(self, record_id: str) -> None:
        """Take a record out, if it is there."""
        if self._tags.pop(record_id, None) is None:
            return
        self._dropped.append(record_id)
        if len(self._dropped) > MAX_DROPPED:
            del self._numbers[self._dropped.popleft()]

    def ids(self, *, without: frozenset[str] = frozenset()) -> list[str]:
        """Return records whose tag is none of those, oldest first."""
        return [record_id for record_id, tag in self._tags.items() if tag not in without]

    def page(
        self, after: str, limit: int, *, is_ascending: bool, tag: str = ""
    ) -> tuple[list[str], bool]:
        """(up to `limit` ids after that one, whether there are more). `after` "" is the beginning.
        Raises KeyError where there never was, or not for long, a record `after`.
        """
        place = self._numbers[after] if after else None
        found = list(islice(self._behind(place, tag, is_ascending=is_ascending), limit + 1))
        return found[:limit], len(found) > limit

    def _behind(self, place: int | None, tag: str, *, is_ascending: bool) -> Iterator[str]:
        for record_id in self._tags if is_ascending else reversed(self._tags):
            number = self._numbers[record_id]
            is_behind = place is None or (number > place if is_ascending else number < place)
            if is_behind and tag in ("", self._tags[record_id]):
                yield record_id
