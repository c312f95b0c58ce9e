"""The order of service: who waits, who is served next, and what that may cost those who run.

The scheduler asks a `ServiceQueue`; which policy it follows is none of the scheduler's business.
`WaitingQueue` serves by rank (first come first served, and classes of priority);
`quire.core.scheduler.fairness` shares tokens among tenants.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Protocol

from quire.core.plan import RowWork
from quire.core.request import Rank, Request, Sequence

_MAX_GAPS = 64


class ServiceQueue(Protocol):
    """Everyone who waits, in a policy's order."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence: Sequence) -> bool: ...

    def sequences(self) -> list[Sequence]:
        """Everyone who waits, in order. O(n log n): for pictures and checks."""
        ...

    @property
    def num_gaps(self) -> int:
        """Entries kept for sequences that have left; bounded by those who wait."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        ...

    def head(self) -> Sequence | None:
        """Return the sequence that is served next."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        ...

    def arrived(self, request: Request) -> None:
        """Note that a request was accepted; its sequences will come and go."""
        ...

    def departed(self, request: Request) -> None:
        """Note that a request has ended."""
        ...

    def charge(self, served: Iterable[tuple[Sequence, RowWork]]) -> None:
        """Charge these sequences for what a planned step computes of them."""
        ...

    def in_order(self, admitted: list[Sequence]) -> list[Sequence]:
        """Admitted sequences that are behind, in the order in which a step's tokens go to them."""
        ...

    def precedes(self, waiting: Sequence, admitted: Sequence) -> bool:
        """Return whether one who waits is to be let in before an admitted one gets more of a
        step."""
        ...

    def displaceable(self, waiting: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Return those who run and may be preempted so that one who waits can run; in order of
        rank."""
        ...


class WaitingQueue:
    """By rank, strictly; who was admitted stays ahead of who waits, but for lower classes of
    priority.

    A heap. A removed sequence leaves a gap, which is skipped when it surfaces.

    The heap is rebuilt once most of it is gaps, so that requests aborted behind a long queue do not
    pile up: O(1) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._entries: dict[Sequence, int] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    @property
    def num_gaps(self) -> int:
        return len(self._heap) - len(self._entries)

    def sequences(self) -> list[Sequence]:
        """Everyone who waits, in order. O(n log n): for pictures and checks."""
        return sorted(self._entries, key=lambda sequence: sequence.rank)

    def push(self, sequence: Sequence) -> None:
        assert sequence not in self._entries
        self._num_pushed += 1
        self._entries[sequence] = self._num_pushed
        heappush(self._heap, (sequence.rank, self._num_pushed, sequence))

    def head(self) -> Sequence | None:
        """Return the sequence that is served next."""
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

    def arrived(self, request: Request) -> None:
        """Do nothing: a rank depends on the request alone."""

    def departed(self, request: Request) -> None:
        """Do nothing."""

    def charge(self, served: Iterable[tuple[Sequence, RowWork]]) -> None:
        """Service changes no rank."""

    def in_order(self, admitted: list[Sequence]) -> list[Sequence]:
        return admitted

    def precedes(self, waiting: Sequence, admitted: Sequence) -> bool:
        return False

    def displaceable(self, waiting: Sequence, running: list[Sequence]) -> list[Sequence]:
        priority = waiting.rank[0]
        if not running or running[-1].rank[0] <= priority:
            return []
        return [sequence for sequence in running if sequence.rank[0] > priority]
