"""Admission: who runs, waits or is parked.

It has a place for every unfinished sequence, and lets the queue's head in once each `Resource` has
its share and no `Prerequisite` is missing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from quire.config.limits import SchedulerLimits
from quire.core.plan import Record
from quire.core.request import Sequence, SequenceStatus
from quire.core.scheduler.fairness import FairQueue
from quire.core.scheduler.preemption import Preemption, choose_victim
from quire.core.scheduler.prerequisites import (
    BlockUser,
    Prerequisite,
    Retained,
    WaitCondition,
)
from quire.core.scheduler.queue import ServiceQueue, WaitingQueue
from quire.core.scheduler.resources import KVBlocks, PrefixTurns, Resource, RowSlots

_by_rank = attrgetter("rank")


class _Refusal(NamedTuple):
    """When the head of the queue found no row or blocks.
    It stays refused until something happens that could help it."""

    sequence: Sequence | None
    num_available: int
    num_free_rows: int
    num_prefill_publications: int

    def still_holds(self, now: _Refusal) -> bool:
        """Return whether neither blocks nor rows have come free since,
        nor a prompt's prefix been published to share."""
        return (
            self.sequence is now.sequence
            and self.num_available >= now.num_available
            and self.num_free_rows >= now.num_free_rows
            and self.num_prefill_publications == now.num_prefill_publications
        )


class Admission:
    """The places of sequences: the queue, the running list,
    and parking for those that wait for something else than memory."""

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: KVBlocks,
        resources: Iterable[Resource] = (),
        prerequisites: Iterable[Prerequisite] = (),
    ) -> None:
        self.waiting: ServiceQueue = FairQueue() if limits.policy == "fair" else WaitingQueue()
        self.running: list[Sequence] = []
        """Everyone with a row, in order of rank."""
        self.num_parked = 0
        self.rows = RowSlots(limits.max_num_seqs)
        self.resources: tuple[Resource, ...] = (self.rows, blocks, *resources)
        self.turns = PrefixTurns(blocks)
        self.prerequisites = tuple(prerequisites)
        self._retained = tuple(each for each in self.prerequisites if isinstance(each, Retained))
        self._users = tuple(each for each in self.prerequisites if isinstance(each, BlockUser))
        for each in self._users:
            each.attach(blocks)
        self.parking: tuple[WaitCondition, ...] = (*self.prerequisites, self.turns)
        self.num_prefill_publications = 0
        """Chunks of prompts of which a block was published: what waits may now share it."""
        self._limits, self._blocks = limits, blocks
        self._refused = _Refusal(None, 0, 0, 0)

    # -- letting in
    # ----------------------------------------------------------------------------------------------

    def admit_next(self, num_tokens_left: int, before: Sequence | None = None) -> Sequence | None:
        """Admit the next sequence of the queue that can run in a step with so many tokens left;
        None where it must wait.

        Strictly in order, but that sequences that lack a prerequisite are parked. With `before`, an
        admitted sequence, only one that is to be served ahead of it.
        """
        while (head := self.waiting.head()) is not None:
            if (
                before is not None and not self.waiting.precedes(head, before)
            ) or not self._can_run(head, num_tokens_left):
                return None
            self.waiting.remove(head)
            if not self._parks(head, self.parking):
                for resource in self.resources:
                    resource.reserve(head)
                self.turns.reserve(head)
                head.waits_for = None
                self.enter(head)
                return head
        return None

    def _can_run(self, head: Sequence, num_tokens_left: int) -> bool:
        """Return whether the head of the queue gets its share of everything scarce. Where it does
        not, it notes the reason."""
        if not self._limits.enable_chunked_prefill and len(head.token_ids) > num_tokens_left:
            head.refuse("its whole prompt does not fit what is left of this step")
            return False
        occasion = _Refusal(
            head, self._blocks.num_available, self.rows.num_free, self.num_prefill_publications
        )
        if self._refused.still_holds(occasion):
            return False
        for resource in self.resources:
            reason = resource.refusal(head)
            if reason is not None:
                head.refuse(reason)
                if resource is self.rows or resource is self._blocks:
                    self._refused = occasion
                return False
        return True

    def _parks(self, sequence: Sequence, conditions: Iterable[WaitCondition]) -> bool:
        """Park a sequence where it has to wait for something that is not scarce; whether it does.
        Its place in the queue is the caller's business."""
        for condition in conditions:
            reason = condition.refusal(sequence)
            if reason is not None:
                sequence.refuse(reason)
                condition.park(sequence)
                self.num_parked += 1
                return True
        return False

    def displacement(self) -> Preemption | None:
        """Choose who is preempted for the head of the queue: one whom the policy puts behind it;
        None where none has to be.

        A head that lacks a prerequisite is parked, and the next one looked at: it could not run in
        its victim's place yet.
        """
        while (head := self.waiting.head()) is not None:
            lower = self.waiting.displaceable(head, self.running)
            if not lower or all(resource.refusal(head) is None for resource in self.resources):
                return None
            if not self._parks(head, self.prerequisites):
                return choose_victim(lower, head, self._blocks.manager)
            self.waiting.remove(head)
        return None

    # -- changing places
    # ---------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """Let a sequence run that has its row and its blocks."""
        sequence.status = SequenceStatus.RUNNING
        sequence.len_at_admission = len(sequence.token_ids)
        insort(self.running, sequence, key=_by_rank)
        for each in self._retained:
            each.retain(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take an unfinished sequence out of wherever it is, with everything it holds."""
        if sequence.status is SequenceStatus.RUNNING:
            self._unpark(self.turns.withdraw(sequence))
            self.running.remove(sequence)
            for resource in reversed(self.resources):
                resource.release(sequence)
            for each in self._retained:
                each.release(sequence)
        elif sequence.status is SequenceStatus.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            for turn in self.parking:
                turn.unpark(sequence)
            self.num_parked -= 1

    def set_aside(self, sequence: Sequence) -> None:
        """Keep a sequence that left while it waits for its siblings, until `resume`."""
        sequence.status = SequenceStatus.PARKED
        self.num_parked += 1

    def resume(self, sequence: Sequence) -> None:
        """Let a sequence that was set aside queue again."""
        sequence.status = SequenceStatus.WAITING
        self._unpark((sequence,))

    def published(self, sequence: Sequence, first: int) -> None:
        """Unpark those that wait for the sequence's blocks from `first` on,
        which are in the index now."""
        self._unpark(self.turns.published(sequence, first))
        # a digest was taken by other content: the rest stays unpublished
        if sequence.table.chain is None:
            self._unpark(self.turns.withdraw(sequence))

    def _unpark(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.num_parked -= 1
            self.waiting.push(sequence)

    # -- prerequisites
    # ----------------------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether a plan is worth making though no request is left."""
        return any(each.has_orders for each in self._users)

    def take_orders(self, now: float) -> dict[str, tuple[Record, ...]]:
        """Collect what the next plan orders of the worker's companions."""
        return {
            each.name: records for each in self.prerequisites if (records := each.take_orders(now))
        }

    def take_news(
        self, news: dict[str, tuple[Record, ...]], now: float
    ) -> list[tuple[Sequence, str]]:
        """Let those queue again whose wait is over; returns those of them that cannot be served,
        and why."""
        failed: list[tuple[Sequence, str]] = []
        for each in self.prerequisites:
            for sequences, error in each.take_news(news.get(each.name, ()), now):
                self._unpark(sequences)
                failed += [(sequence, error) for sequence in sequences if error is not None]
        return failed

    def lose_flights(self) -> None:
        """Have what steps in flight ordered ordered again."""
        for each in self.prerequisites:
            each.lose_flights()
