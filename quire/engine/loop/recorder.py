"""The last steps of an engine, kept to be looked at: a ring of plans, from which any state within
it can be made again.

A step costs the recorder next to nothing: it keeps lists that the scheduler has made already, and
looks at single rows only where they come, go, grow, or compute more than a token. Plans themselves
are not kept: hundreds of small records that live on cost the allocator 50 us a step. A reader that
looks pays for the rest. Bounded in steps, in pieces of work and in tokens; what leaves the ring is
folded into the base before it. Never keeps a result, a text or a tensor.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.common.numbers import ceil_div
from quire.core.content import short_ids
from quire.core.plan import ONE_SAMPLE, AppendedBlocks, BlockCopy, ReplacedBlock, StepPlan
from quire.core.request import Sequence, SequenceStatus
from quire.core.scheduler.experts import expert_use
from quire.core.scheduler.flight import Flight
from quire.core.scheduler.prompt_cache import prompt_cache
from quire.core.scheduler.scheduler import Scheduler
from quire.core.scheduler.tiers import origin_of, stored_stats
from quire.engine.loop.inspection import (
    Base,
    BlockContent,
    EnteredRow,
    Inspection,
    RequestSnapshot,
    RowState,
    StepRecord,
)

MAX_STEPS = 512
MAX_WORK = 1 << 17
"""Pieces of work in the ring; a plain one takes 8 bytes."""
MAX_TOKENS = 1 << 19
"""Tokens of the sequences that entered within the ring, which keeps them alive."""
MAX_REQUESTS = 256
"""Sequences that an inspection names."""

Published = tuple[int, tuple[int, ...]]
_NONE: list[Published] = []


Chunk = tuple[int, int, int, int]
"""(row, first position, tokens, samples)."""


class _Removed(NamedTuple):
    """A row that was given up."""

    row: int
    why: str
    sequence: Sequence | None
    num_computed: int
    """What it had computed by then."""


class _Entry(NamedTuple):
    """A row that was taken."""

    sequence: Sequence
    record: EnteredRow


@dataclass(slots=True)
class _Step:
    """One step, as cheaply as it can be kept."""

    step: int
    began_s: float
    predicted_s: float
    in_flight: list[Sequence]
    rows: dict[Sequence, int]
    """Everyone's row in this step; shared with steps that have the same."""
    num_tokens: int
    chunks: tuple[Chunk, ...]
    """All work that is more than one more token of a row that was there."""
    appended: tuple[AppendedBlocks, ...]
    replaced: tuple[ReplacedBlock, ...]
    copies: tuple[BlockCopy, ...]
    ahead: dict[int, int] = field(default_factory=dict)
    """By row: tokens of its chunk that the row did not know; only those that were right count."""
    removed: tuple[_Removed, ...] = ()
    entered: tuple[_Entry, ...] = ()
    published: list[Published] = field(default_factory=lambda: _NONE)
    ended_s: float = 0.0
    num_waiting: int = 0
    waits_for: str | None = None
    num_new_tokens: int = 0

    def decoded(self) -> tuple[int, ...]:
        """Return rows that computed one more token."""
        rows = map(self.rows.__getitem__, self.in_flight)
        if not self.chunks:
            return tuple(rows)
        others = {row for row, *_ in self.chunks}
        return tuple(row for row in rows if row not in others)

    def settle(self, block_size: int) -> None:
        """Count of each chunk what its row has computed, now that the step was taken in."""
        sequences = {self.rows[each]: each for each in self.in_flight}
        chunks, num_void = [], dict[int, int]()
        for chunk in self.chunks:
            row, start, count, num_samples = chunk
            if row in self.ahead:
                sequence = sequences[row]
                is_running = sequence.status is SequenceStatus.RUNNING
                end = sequence.num_computed if is_running else len(sequence.token_ids) - 1
                end = max(start, min(start + count, end))
                num_samples = 1 + max(0, end - start - count + self.ahead[row])
                num_void[row] = ceil_div(start + count, block_size) - ceil_div(end, block_size)
                chunk = (row, start, end - start, num_samples)
            chunks.append(chunk)
        self.chunks = tuple(chunks)
        self.appended = tuple(
            AppendedBlocks(row, blocks[: len(blocks) - num_void.get(row, 0)])
            for row, blocks in self.appended
        )

    def chunk_of(self, sequence: Sequence) -> Chunk | None:
        """Return the chunk of a sequence, if it has one."""
        row = self.rows.get(sequence, -1) if self.chunks else -1
        return next((chunk for chunk in self.chunks if chunk[0] == row), None)


@dataclass(slots=True)
class _State:
    """Rows and cached blocks at some step."""

    step: int = 0
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """By row."""
    blocks: dict[int, list[int]] = field(default_factory=dict)
    """By row."""
    cached: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens by block."""

    def apply(self, step: _Step) -> None:
        """Go on to the next step."""
        self.step = step.step
        for removed in step.removed:
            self.sequences.pop(removed.row, None)
            self.blocks.pop(removed.row, None)
        for sequence, record in step.entered:
            self.sequences[record.row] = sequence
            self.blocks[record.row] = list(record.blocks)
        for row, entry, block in step.replaced:
            self.blocks[row][entry] = block
        for row, blocks in step.appended:
            self.blocks[row].extend(blocks)
        for block, tokens in step.published:
            if block >= 0:
                self.cached[block] = tokens
            else:
                self.cached.pop(~block, None)

    def copy(self) -> _State:
        blocks = {row: blocks.copy() for row, blocks in self.blocks.items()}
        return _State(self.step, self.sequences.copy(), blocks, self.cached.copy())


class StepRecorder:
    """Follows one scheduler, which must be new. `begin` belongs right after `schedule`,
    `end` right after `update`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changes: list[Published] = []
        scheduler.manager.index.changes = self._changes
        self._engine = secrets.token_hex(6)
        self._steps: deque[_Step] = deque()
        self._base = _State()
        self._sequences: dict[int, Sequence] = {}
        """Who has a row now."""
        self._rows: dict[Sequence, int] = {}
        """The same the other way round; replaced, never changed."""
        self._open: deque[_Step] = deque()
        """Begun and not ended, the oldest first."""
        self._flight = Flight(0, [])
        """The step that was begun last."""
        self._num_computed = scheduler.stats.num_computed_tokens
        self._num_work = 0
        self._num_tokens = 0

    # -- every step
    # ----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, now: float) -> None:
        """Begin the record of a step that is about to be computed."""
        scheduler = self._scheduler
        before, self._flight = self._flight, scheduler.flights[-1]
        removed = (
            tuple(self._remove(row, before) for row in plan.removed_rows)
            if plan.removed_rows
            else ()
        )
        entered = self._enter(plan) if plan.new_rows else ()
        if removed or entered:
            rows = self._rows.copy()
            for each in removed:
                if each.sequence is not None:
                    del rows[each.sequence]
            rows.update((entry.sequence, entry.record.row) for entry in entered)
            self._rows = rows
        num_tokens = scheduler.stats.num_computed_tokens - self._num_computed
        self._num_computed += num_tokens
        chunks: tuple[Chunk, ...] = ()
        ahead: dict[int, int] = {}
        if (
            entered
            or num_tokens != len(plan.work)
            or num_tokens >= scheduler.limits.max_num_batched_tokens
        ):
            new = {entry.record.row for entry in entered}
            chunks = tuple(
                (work.row, work.start, work.num_tokens, work.num_samples)
                for work in plan.work
                if work[2] != 1 or work[3] != ONE_SAMPLE or work[0] in new
            )
            ahead = {work.row: count for work in plan.work if (count := work.num_ahead)}
        forecast = self._flight.forecast
        predicted_s = 0.0 if forecast is None else forecast.seconds
        self._open.append(_Step(
            plan.step_id, now, predicted_s, self._flight.sequences, self._rows, num_tokens, chunks,
            plan.appended_blocks, plan.replaced_blocks, plan.copies, ahead, removed,
            entered,
        ))  # fmt: skip

    def end(self, now: float) -> None:
        """End the oldest record: its step has been computed and taken in."""
        if not self._open:
            return
        step = self._open.popleft()
        step.ended_s = now
        if step.ahead:
            step.settle(self._scheduler.limits.block_size)
        if self._changes:
            step.published = self._changes.copy()
            self._changes.clear()
        scheduler = self._scheduler
        step.num_waiting = scheduler.num_waiting
        if step.num_waiting:
            head = scheduler.waiting.head()
            step.waits_for = head.waits_for if head is not None else None
        if step.entered:
            step.num_new_tokens = sum(entry.record.num_known_tokens for entry in step.entered)
        self._steps.append(step)
        self._num_work += len(step.in_flight)
        self._num_tokens += step.num_new_tokens
        while (
            len(self._steps) > MAX_STEPS
            or self._num_work > MAX_WORK
            or self._num_tokens > MAX_TOKENS
        ):
            oldest = self._steps.popleft()
            self._num_work -= len(oldest.in_flight)
            self._num_tokens -= oldest.num_new_tokens
            self._base.apply(oldest)

    def forget_open(self) -> None:
        """Forget the open records: the worker's state was lost, and all rows with it."""
        self._open.clear()

    def _remove(self, row: int, before: Flight) -> _Removed:
        sequence = self._sequences.pop(row, None)
        if sequence is None:
            return _Removed(row, "preempted", None, 0)
        why = _end_of(sequence)
        # The last token sampled is computed only where a step was planned before its outcome was
        # known; a row that failed did not sample.
        is_last_computed = why == "error" or sequence in before.gone
        return _Removed(row, why, sequence, len(sequence.token_ids) - (not is_last_computed))

    def _enter(self, plan: StepPlan) -> tuple[_Entry, ...]:
        rows, in_flight = [work[0] for work in plan.work], self._flight.sequences
        entered = []
        for new in plan.new_rows:
            place = rows.index(new.row)  # a new row always has work
            sequence = self._sequences[new.row] = in_flight[place]
            request = sequence.request
            record = EnteredRow(
                row=new.row,
                name=new.name,
                tenant=request.tenant,
                num_prompt_tokens=new.num_prompt_tokens,
                num_known_tokens=len(new.token_ids),
                num_hit_tokens=plan.work[place].start,
                num_preemptions=request.metrics.num_preemptions,
                arrival_s=request.metrics.arrival_s,
                blocks=new.block_table,
            )
            entered.append(_Entry(sequence, record))
        return tuple(entered)

    # -- for readers
    # -------------------------------------------------------------------------------------------

    def inspect(self, engine: str, since: int, now: float) -> Inspection:
        """Return the steps after `since`, if they are all here and `engine` is this one;
        else everything there is."""
        scheduler, manager = self._scheduler, self._scheduler.manager
        stored = stored_stats(scheduler.admission.prerequisites)
        cache = prompt_cache(scheduler.admission.prerequisites)
        follows = engine == self._engine and self._base.step <= since <= self.last_step
        base = None if follows else self._base_record()
        records = self._records(since if follows else -1)
        resident = {sequence.row for sequence in scheduler.running}
        stats, limits = scheduler.stats, scheduler.limits
        return Inspection(
            engine=self._engine,
            now_s=now,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_groups=len(limits.windows),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            last_step=self.last_step,
            base=base,
            steps=records,
            gone_rows=tuple(row for row in self._sequences if row not in resident),
            requests=tuple(self._requests(now)),
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_preemptions=stats.num_preemptions,
            num_copies=manager.num_copies,
            num_merges=manager.num_merges,
            num_evictions=manager.num_evictions,
            waste=stats.waste,
            **expert_use(scheduler.admission.prerequisites),
            num_stored_kv_blocks=stored.num_stored_blocks,
            num_restored_kv_blocks=stored.num_restored_blocks,
            num_faulty_kv_blocks=stored.num_faulty_blocks,
            num_kept_kv_blocks=0 if cache is None else cache.kept.num_blocks,
        )

    @property
    def last_step(self) -> int:
        """The newest step that can be looked at."""
        return self._steps[-1].step if self._steps else self._base.step

    def content(self, block: int, step: int) -> BlockContent | None:
        """Return what a block held in a step; None where neither the step nor the block is
        known."""
        if (
            not 0 <= block < self._scheduler.limits.num_blocks
            or not self._base.step <= step <= self.last_step
        ):
            return None
        state = self._base.copy()
        for each in self._steps:
            if each.step > step:
                break
            state.apply(each)
        size = self._scheduler.limits.block_size
        owners = [row for row, blocks in state.blocks.items() if block in blocks]
        tokens, position = short_ids(state.cached.get(block, ())), -1
        if owners:
            sequence = state.sequences[owners[0]]
            entry = state.blocks[owners[0]].index(block)
            position = entry // len(self._scheduler.limits.windows) * size
            if not tokens:
                end = min(position + size, self._computed_at(sequence, step))
                tokens = tuple(sequence.token_ids[position:end])
        names = tuple(state.sequences[row].name for row in owners)
        scheduler = self._scheduler
        origin = origin_of(scheduler.admission.prerequisites, scheduler.manager, block)
        return BlockContent(block, step, tokens, names, position, block in state.cached, *origin)

    def _first_positions(self) -> dict[Sequence, int]:
        """Return computed tokens of the base's sequences: from where they are next known,
        less what they computed until there."""
        positions: dict[Sequence, int] = {}
        counts = dict.fromkeys(self._base.sequences.values(), 0)
        for step in self._steps:
            for removed in step.removed:
                if removed.sequence in counts:
                    positions[removed.sequence] = removed.num_computed - counts.pop(
                        removed.sequence
                    )
            if step.chunks:
                for sequence in [sequence for sequence in counts if sequence in step.rows]:
                    chunk = step.chunk_of(sequence)
                    if chunk is not None:
                        positions[sequence] = chunk[1] - counts.pop(sequence)
            if not counts:
                break
            for sequence in step.in_flight:
                if sequence in counts:
                    counts[sequence] += 1
        for sequence, count in counts.items():
            is_running = sequence.status is SequenceStatus.RUNNING
            positions[sequence] = (
                sequence.num_computed if is_running else len(sequence.token_ids) - 1
            ) - count
        return positions

    def _computed_at(self, sequence: Sequence, step: int) -> int:
        """Return computed tokens of a sequence after a step."""
        computed = self._first_positions().get(sequence, 0)
        for each in self._steps:
            if each.step > step:
                break
            if sequence in each.in_flight:
                chunk = each.chunk_of(sequence)
                computed = computed + 1 if chunk is None else chunk[1] + chunk[2]
        return computed

    def _base_record(self) -> Base:
        state, positions = self._base, self._first_positions()
        rows = (
            RowState(
                row, each.name, each.num_prompt_tokens, positions[each], tuple(state.blocks[row])
            )
            for row, each in state.sequences.items()
        )
        return Base(state.step, tuple(rows), tuple(state.cached))

    def _records(self, since: int) -> tuple[StepRecord, ...]:
        newest_first = itertools.takewhile(lambda step: step.step > since, reversed(self._steps))
        return tuple(_record(step) for step in reversed(list(newest_first)))

    def _requests(self, now: float) -> Iterator[RequestSnapshot]:
        scheduler = self._scheduler
        for sequence in scheduler.running[:MAX_REQUESTS]:
            yield _request_state(sequence, now)
        waiting = scheduler.waiting.sequences()
        parked = [each for each in self._parked(set(waiting))]
        for place, sequence in enumerate(
            [*parked, *waiting][: max(32, MAX_REQUESTS - len(scheduler.running))]
        ):
            number = place - len(parked)
            reason = sequence.waits_for
            if number > 0:
                reason = f"{number} before it in the order of service"
            yield _request_state(sequence, now, reason or "the step in progress")

    def _parked(self, waiting: set[Sequence]) -> Iterator[Sequence]:
        if not self._scheduler.admission.num_parked:
            return
        for request in self._scheduler.requests.values():
            for sequence in request.sequences:
                is_idle = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PARKED)
                if is_idle and sequence not in waiting:
                    yield sequence


def _record(step: _Step) -> StepRecord:
    return StepRecord(
        step=step.step,
        began_s=step.began_s,
        elapsed_s=step.ended_s - step.began_s,
        predicted_s=step.predicted_s,
        num_tokens=step.num_tokens,
        removed=tuple((removed.row, removed.why) for removed in step.removed),
        entered=tuple(entry.record for entry in step.entered),
        replaced=tuple((row, entry, block) for row, entry, block in step.replaced),
        appended=tuple((row, blocks) for row, blocks in step.appended),
        copies=tuple((source, destination) for source, destination in step.copies),
        decoded=step.decoded(),
        chunks=step.chunks,
        published=tuple(block for block, _ in step.published),
        num_waiting=step.num_waiting,
        waits_for=step.waits_for,
    )


def _end_of(sequence: Sequence) -> str:
    """Return why a row was given up."""
    if sequence.status is not SequenceStatus.FINISHED or sequence.finish_reason is None:
        return "preempted"
    return sequence.finish_reason.value


def _request_state(sequence: Sequence, now: float, waits_for: str | None = None) -> RequestSnapshot:
    request = sequence.request
    return RequestSnapshot(
        name=sequence.name,
        row=sequence.row,
        tenant=request.tenant,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=sequence.num_output_tokens,
        max_tokens=request.max_tokens,
        num_hit_tokens=request.metrics.num_prefix_hit_tokens,
        num_preemptions=request.metrics.num_preemptions,
        age_s=max(0.0, now - request.metrics.arrival_s),
        waits_for=waits_for,
    )
