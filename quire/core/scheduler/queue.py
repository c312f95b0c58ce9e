"""The waiting queue: sequences in order of rank, with removal at any place by leaving a gap."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from quire.core.request import Rank, Sequence

_MAX_GAPS = 64


class WaitingQueue:
    """A heap by rank. A removed sequence leaves a gap, which is skipped when it surfaces.

    The heap is rebuilt once most of it is gaps, so that requests aborted behind a long queue do not pile up: O(1) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._entries: dict[Sequence, int] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def sequences(self) -> list[Sequence]:
        """Everyone who waits, in order. O(n log n): for pictures and checks."""
        return sorted(self._entries, key=lambda sequence: sequence.rank)

    def push(self, sequence: Sequence) -> None:
        assert sequence not in self._entries
        self._num_pushed += 1
        self._entries[sequence] = self._num_pushed
        heappush(self._heap, (sequence.rank, self._num_pushed, sequence))

    def head(self) -> Sequence | None:
        """The sequence that is served next."""
        while self._heap:
            _, entry, sequence = self._heap[0]
            if self._entries.get(sequence) == entry:
                return sequence
            heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence]
        if len(self._heap) > 2 * len(self._entries) + _MAX_GAPS:
            self._heap = [item for item in self._heap if self._entries.get(item[2]) == item[1]]
            heapify(self._heap)
