"""Fair sharing of tokens among tenants, by virtual counters.

Each tenant has a counter of the tokens computed for it, divided by its weight; a waiting tenant is
served in the order of the counters, so that tenants who always want more get tokens in the
proportion of their weights, however many requests each sends and however long they are. Sheng et
al., "Fairness in Serving Large Language Models" (OSDI 2024), give the scheme and its bounds. What
counts is what steps really compute: prompt tokens that the prefix cache serves cost nothing.

Owns the counters. A tenant who comes back after a pause starts no lower than the lowest of those
who are there, so that no tenant saves up. Priority classes stand above: a more urgent class is
served first whatever the counters say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from quire.core.plan import RowWork
from quire.core.request import Request, Sequence
from quire.core.scheduler.queue import WaitingQueue

MAX_ABSENT_TENANTS = 1024
"""Tenants remembered although they have no request; the least served are forgotten first,
since theirs is lifted anyway."""


@dataclass(slots=True)
class Account:
    """One tenant's service."""

    served: float = 0.0
    """Tokens computed, over the weight."""
    weight: float = 1.0
    num_requests: int = 0
    """In flight."""


class FairQueue:
    """Implements `ServiceQueue`: a queue by rank for each tenant; to find the next one,
    each tenant who waits is looked at."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self._queues: dict[str, WaitingQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        queue = self._queues.get(sequence.request.tenant)
        return queue is not None and sequence in queue

    @property
    def num_gaps(self) -> int:
        return sum(queue.num_gaps for queue in self._queues.values())

    def sequences(self) -> list[Sequence]:
        return sorted(
            (s for queue in self._queues.values() for s in queue.sequences()), key=self._turn
        )

    def push(self, sequence: Sequence) -> None:
        self._queues.setdefault(sequence.request.tenant, WaitingQueue()).push(sequence)

    def head(self) -> Sequence | None:
        heads = (queue.head() for queue in self._queues.values())
        return min((head for head in heads if head is not None), key=self._turn, default=None)

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[tenant]

    def arrived(self, request: Request) -> None:
        account = self.accounts.setdefault(request.tenant, Account())
        account.weight = request.weight
        if account.num_requests == 0:
            present = [other.served for other in self.accounts.values() if other.num_requests]
            account.served = max(account.served, min(present, default=0.0))
        account.num_requests += 1

    def departed(self, request: Request) -> None:
        self.accounts[request.tenant].num_requests -= 1
        absent = [tenant for tenant, account in self.accounts.items() if not account.num_requests]
        if len(absent) > MAX_ABSENT_TENANTS:
            del self.accounts[min(absent, key=lambda tenant: self.accounts[tenant].served)]

    def charge(self, served: Iterable[tuple[Sequence, RowWork]]) -> None:
        for sequence, work in served:
            account = self.accounts[sequence.request.tenant]
            account.served += work.num_tokens / account.weight

    def in_order(self, admitted: list[Sequence]) -> list[Sequence]:
        return sorted(admitted, key=self._turn)

    def precedes(self, waiting: Sequence, admitted: Sequence) -> bool:
        return self._turn(waiting)[:2] < self._turn(admitted)[:2]

    def displaceable(self, waiting: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Lower classes; and for a tenant who runs nothing at all,
        those of better served tenants who run several."""
        num_running = Counter(sequence.request.tenant for sequence in running)
        is_shut_out = not num_running[waiting.request.tenant]
        priority, served = self._turn(waiting)[:2]

        def may_go(sequence: Sequence) -> bool:
            its_priority, its_served = self._turn(sequence)[:2]
            is_rich = num_running[sequence.request.tenant] > 1 and its_served > served
            return its_priority > priority or (its_priority == priority and is_shut_out and is_rich)

        return [sequence for sequence in running if may_go(sequence)]

    def _turn(self, sequence: Sequence) -> tuple[int, float, int, int]:
        priority, arrival, index = sequence.rank
        return (priority, self.accounts[sequence.request.tenant].served, arrival, index)
