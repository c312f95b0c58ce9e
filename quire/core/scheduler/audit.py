"""Invariants of the scheduler: what must hold between two steps, and of every plan before it is
carried out.

Reads everything, changes nothing. O(blocks + sequences). A failure is a bug of Quire's own, hence
`AssertionError`. The KV bookkeeping below has its own audit, which this one calls.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.kvcache.audit import audit_manager
from quire.core.plan import StepPlan
from quire.core.request import Sequence, SequenceStatus
from quire.core.scheduler.prerequisites import WaitCondition
from quire.core.scheduler.scheduler import Scheduler


def audit(scheduler: Scheduler, *, deep: bool = True) -> None:
    """Check everything between two steps. With `deep=False` digests are not
    recomputed and tokens not compared."""
    sequences = [
        sequence for request in scheduler.requests.values() for sequence in request.sequences
    ]
    running = [sequence for sequence in sequences if sequence.status is SequenceStatus.RUNNING]
    audit_manager(scheduler.manager, [sequence.table for sequence in running], deep=deep)
    _audit_places(scheduler, sequences, running)
    _audit_rows(scheduler, running)
    _audit_reservations(scheduler, running)
    _audit_turns(scheduler)
    for sequence in sequences:
        _audit_sequence(scheduler, sequence)
        if deep:
            _audit_published(sequence)


def audit_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check a plan before it is carried out: within the limits,
    and every slot written has exactly one owner."""
    limits, size = scheduler.limits, scheduler.limits.block_size
    assert plan.num_tokens <= limits.max_num_batched_tokens, f"{plan.num_tokens} tokens in a step"
    can_be_empty = not scheduler.has_work or _parked(scheduler.admission.prerequisites)
    assert plan.work or can_be_empty, "requests are unfinished, and nothing is scheduled"
    by_row = {sequence.row: sequence for sequence in scheduler.running}
    earlier = [flight for flight in scheduler.flights if flight.step_id < plan.step_id]
    expected = {
        sequence
        for flight in earlier
        for sequence in flight.sequences
        if sequence not in flight.gone
    }
    assert len({work.row for work in plan.work}) == len(plan.work), (
        "a row has work twice in one step"
    )
    for work in plan.work:
        sequence, end = by_row[work.row], work.start + work.num_tokens
        known, computed = len(sequence.token_ids), sequence.num_computed
        # of whom a step in flight computes what comes before, and may sample the token computed
        # here
        if sequence in expected:
            known, computed = known + (work.start == known), sequence.num_planned - work.num_tokens
        is_gap = work.num_tokens > 0 and work.start == computed
        assert is_gap, (
            f"{sequence.name}: {work.num_tokens} tokens from {work.start} on, but {computed} "
            "computed"
        )
        assert end <= known + work.num_ahead, f"{sequence.name}: work beyond the known tokens"
        assert end < len(sequence.request.prompt_token_ids) + max(sequence.request.max_tokens, 1), (
            f"{sequence.name}: work beyond the last token"
        )
        num_slots = scheduler.manager.num_places(sequence.table) * size
        assert sequence.num_reserved >= 0 and end <= num_slots, f"{sequence.name}: no slots"
        _audit_reads(scheduler, sequence, work.start)
        num_groups = scheduler.manager.num_groups
        first, last = work.start // size * num_groups, ((end - 1) // size + 1) * num_groups
        for block in sequence.table.blocks[first:last]:
            num_owners = scheduler.manager.pool.ref_counts[block]
            assert num_owners == 1, (
                f"{sequence.name} writes to block {block}, which has {num_owners} owners"
            )
            assert block not in scheduler.manager.index, (
                f"{sequence.name} writes to block {block}, which is published"
            )


def _audit_reads(scheduler: Scheduler, sequence: Sequence, start: int) -> None:
    """Every block that a token at `start` or later sees has an owner."""
    size, num_groups = scheduler.limits.block_size, scheduler.manager.num_groups
    for group, window in enumerate(scheduler.limits.windows):
        first = 0 if window is None else max(0, start - window + 1) // size
        for block in sequence.table.blocks[first * num_groups + group :: num_groups]:
            assert block >= 0 and scheduler.manager.pool.ref_counts[block] > 0, (
                f"{sequence.name} reads block {block} of group {group}, which was given back"
            )


def _audit_places(scheduler: Scheduler, sequences: list[Sequence], running: list[Sequence]) -> None:
    """Check that each unfinished sequence is in exactly one queue, and no other sequence in any."""
    turns = _parked(scheduler.admission.parking)
    waiting = set(scheduler.waiting.sequences())
    beams = {sequence for sequence in sequences if sequence.status is SequenceStatus.PARKED}
    wanting = {sequence for sequence in sequences if sequence.status is SequenceStatus.WAITING}
    assert scheduler.running == sorted(running, key=lambda s: s.rank), (
        "the running list is wrong or out of order"
    )
    assert waiting | turns == wanting, (
        f"waiting: {_names(waiting | turns)}, should be {_names(wanting)}"
    )
    assert not waiting & turns, f"both in the queue and parked: {_names(waiting & turns)}"
    num_parked = len(turns) + len(beams)
    counted = scheduler.admission.num_parked
    assert counted == num_parked, f"num_parked={counted}, but {num_parked} are parked"
    num_queues = len({sequence.request.tenant for sequence in waiting}) + 1
    num_gaps = scheduler.waiting.num_gaps
    assert num_gaps <= len(waiting) + 64 * num_queues, (
        f"{num_gaps} gaps in the queue for {len(waiting)} that wait"
    )
    for request_id, request in scheduler.requests.items():
        assert request_id == request.request_id and not request.is_finished, (
            f"{request_id} is finished and still known"
        )


def _audit_rows(scheduler: Scheduler, running: list[Sequence]) -> None:
    rows = [sequence.row for sequence in running]
    assert sorted(rows + scheduler.rows._free) == list(range(scheduler.limits.max_num_seqs)), (
        f"rows {rows} are in use"
    )


def _audit_reservations(scheduler: Scheduler, running: list[Sequence]) -> None:
    total = sum(sequence.num_reserved for sequence in running)
    assert scheduler.blocks.num_reserved == total, (
        f"{scheduler.blocks.num_reserved} blocks reserved, {total} promised"
    )
    assert total <= scheduler.manager.pool.num_free, (
        f"{total} blocks promised, {scheduler.manager.pool.num_free} free"
    )
    for sequence in running:
        if not sequence.has_progressed:
            num_places = scheduler.manager.num_places_for(len(sequence.token_ids))
            needed = scheduler.manager.num_promised(sequence.table, num_places)
            assert sequence.num_reserved >= needed, (
                f"{sequence.name}: {sequence.num_reserved} blocks promised, needs {needed}"
            )


def _audit_turns(scheduler: Scheduler) -> None:
    owners = scheduler.admission.turns._owners
    for owner in owners.values():
        assert owner.status is SequenceStatus.RUNNING, (
            f"{owner.name} announces a block and is {owner.status.value}"
        )
    for digest, parked in scheduler.admission.turns._waiting.items():
        assert not parked or digest in owners, (
            f"{_names(set(parked))} wait for a block that no sequence computes"
        )


def _audit_sequence(scheduler: Scheduler, sequence: Sequence) -> None:
    name, known, computed = sequence.name, len(sequence.token_ids), sequence.num_computed
    if sequence.status is SequenceStatus.RUNNING:
        assert 0 <= computed <= known, f"{name}: {computed} tokens computed of {known}"
        num_filled, planned = sequence.table.num_filled, sequence.num_planned
        assert computed <= num_filled, f"{name}: {computed} tokens computed, {num_filled} in slots"
        is_in_flight = any(
            sequence in flight.sequences and sequence not in flight.gone
            for flight in scheduler.flights
        )
        assert is_in_flight == (planned > computed), (
            f"{name}: {computed} tokens computed, {planned} planned"
        )
        assert planned <= num_filled, f"{name}: {planned} tokens planned, {num_filled} in slots"
        return
    assert not sequence.table.blocks, (
        f"{name} is {sequence.status.value} and holds blocks {sequence.table.blocks}"
    )
    holds_nothing = (
        sequence.row == -1
        and sequence.num_reserved == 0
        and computed == 0
        and not sequence.is_resident
    )
    assert holds_nothing, f"{name} is {sequence.status.value} and holds something"


def _audit_published(sequence: Sequence) -> None:
    """Check that a table has published what its sequence says."""
    node, size = (
        sequence.table.chain,
        len(sequence.keys.tokens[0]) if sequence.keys and sequence.keys.tokens else 0,
    )
    for place in range(sequence.table.num_chained - 1, -1, -1):
        if node is None:
            return
        expected = tuple(sequence.content_ids[place * size : (place + 1) * size])
        assert node.tokens == expected, (
            f"{sequence.name}: block {place} is published with tokens {node.tokens}"
        )
        node = node.parent


def _parked(places: Iterable[WaitCondition]) -> set[Sequence]:
    return {sequence for place in places for sequence in place.parked()}


def _names(sequences: set[Sequence]) -> list[str]:
    return sorted(sequence.name for sequence in sequences)
