"""The last steps of an engine, kept to be looked at: a ring of plans, from which any state within it can be made again.

A step costs the recorder next to nothing: it keeps what the plan holds already and touches single rows only where they come,
go or grow. Whoever looks pays for the rest. Bounded in steps, in pieces of work and in tokens; what leaves the ring is folded
into the base before it. Never keeps a result, a text or a tensor.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.core.plan import AppendedBlocks, BlockCopy, ReplacedBlock, RowWork, StepPlan
from quire.core.request import Sequence, SequenceStatus
from quire.core.scheduler.scheduler import Scheduler
from quire.engine.inspection import (
    Base,
    BlockContent,
    EnteredRow,
    Inspection,
    RequestState,
    RowState,
    StepRecord,
)

MAX_STEPS = 512
MAX_WORK = 1 << 16
"""Pieces of work in the ring; each takes about 140 bytes."""
MAX_TOKENS = 1 << 20
"""Tokens of the sequences that entered within the ring, which keeps their lists alive."""
MAX_REQUESTS = 256
"""Sequences that an inspection names."""

Published = tuple[int, tuple[int, ...]]
_NONE: list[Published] = []


@dataclass(slots=True)
class _Stream:
    """A sequence, as far as it must be known when it has ended."""

    name: str
    token_ids: list[int]
    """The sequence's own list, which only ever grows."""
    num_prompt_tokens: int


@dataclass(slots=True)
class _Entry:
    stream: _Stream
    record: EnteredRow


@dataclass(slots=True)
class _Step:
    """One step, as cheaply as it can be kept."""

    step: int
    began_s: float
    work: tuple[RowWork, ...]
    appended: tuple[AppendedBlocks, ...]
    replaced: tuple[ReplacedBlock, ...]
    copies: tuple[BlockCopy, ...]
    removed: tuple[tuple[int, str], ...] = ()
    entered: tuple[_Entry, ...] = ()
    published: list[Published] = field(default_factory=lambda: _NONE)
    ended_s: float = 0.0
    num_waiting: int = 0
    waits_for: str | None = None
    num_new_tokens: int = 0


@dataclass(slots=True)
class _State:
    """Rows and cached blocks at some step."""

    step: int = 0
    streams: dict[int, _Stream] = field(default_factory=dict)
    """By row."""
    blocks: dict[int, list[int]] = field(default_factory=dict)
    """By row."""
    cached: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens by block."""

    def apply(self, step: _Step) -> None:
        """Go on to the next step."""
        self.step = step.step
        for row, _ in step.removed:
            self.streams.pop(row, None)
            self.blocks.pop(row, None)
        for entry in step.entered:
            self.streams[entry.record.row] = entry.stream
            self.blocks[entry.record.row] = list(entry.record.blocks)
        for row, place, block in step.replaced:
            self.blocks[row][place] = block
        for row, blocks in step.appended:
            self.blocks[row].extend(blocks)
        for block, tokens in step.published:
            if block >= 0:
                self.cached[block] = tokens
            else:
                self.cached.pop(~block, None)

    def copy(self) -> _State:
        blocks = {row: blocks.copy() for row, blocks in self.blocks.items()}
        return _State(self.step, self.streams.copy(), blocks, self.cached.copy())


class StepRecorder:
    """Follows one scheduler, which must be new. `begin` belongs right after `schedule`, `end` right after `update`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changes: list[Published] = []
        scheduler.manager.index.changes = self._changes
        self._engine = secrets.token_hex(6)
        self._steps: deque[_Step] = deque()
        self._base = _State()
        self._sequences: dict[int, Sequence] = {}
        """Who has a row now."""
        self._current: _Step | None = None
        self._num_work = 0
        self._num_tokens = 0

    # -- every step --------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, now: float) -> None:
        """A step is about to be computed."""
        step = _Step(plan.step_id, now, plan.work, plan.appended_blocks, plan.replaced_blocks, plan.copies)
        if plan.removed_rows:
            step.removed = tuple((row, _end_of(self._sequences.pop(row, None))) for row in plan.removed_rows)
        if plan.new_rows:
            self._enter(step, plan)
        self._current = step

    def end(self, now: float) -> None:
        """It has been computed and taken in."""
        step, self._current = self._current, None
        if step is None:
            return
        step.ended_s = now
        if self._changes:
            step.published = self._changes.copy()
            self._changes.clear()
        scheduler = self._scheduler
        step.num_waiting = scheduler.num_waiting
        if step.num_waiting:
            head = scheduler.waiting.head()
            step.waits_for = head.waits_for if head is not None else None
        self._steps.append(step)
        self._num_work += len(step.work)
        self._num_tokens += step.num_new_tokens
        while len(self._steps) > MAX_STEPS or self._num_work > MAX_WORK or self._num_tokens > MAX_TOKENS:
            oldest = self._steps.popleft()
            self._num_work -= len(oldest.work)
            self._num_tokens -= oldest.num_new_tokens
            self._base.apply(oldest)

    def _enter(self, step: _Step, plan: StepPlan) -> None:
        by_row = {sequence.row: sequence for sequence in self._scheduler.running}
        starts = {work.row: work.start for work in plan.work}
        entered = []
        for new in plan.new_rows:
            sequence = by_row[new.row]
            self._sequences[new.row] = sequence
            request = sequence.request
            record = EnteredRow(
                row=new.row,
                name=new.name,
                tenant=request.tenant,
                num_prompt_tokens=new.num_prompt_tokens,
                num_known_tokens=len(new.token_ids),
                num_hit_tokens=starts.get(new.row, 0),
                num_preemptions=request.metrics.num_preemptions,
                arrival_s=request.metrics.arrival_s,
                blocks=new.block_table,
            )
            entered.append(_Entry(_Stream(new.name, sequence.token_ids, new.num_prompt_tokens), record))
            step.num_new_tokens += len(new.token_ids)
        step.entered = tuple(entered)

    # -- for whoever looks -------------------------------------------------------------------------------------------

    def inspect(self, engine: str, since: int, now: float) -> Inspection:
        """The steps after `since`, if they are all here and `engine` is this one; else everything there is."""
        scheduler, manager = self._scheduler, self._scheduler.manager
        follows = engine == self._engine and self._base.step <= since <= self.last_step
        positions = self._first_positions()
        base = None if follows else self._base_record(positions)
        records = [record for record in self._records(positions, since if follows else -1)]
        resident = {sequence.row for sequence in scheduler.running}
        stats, limits = scheduler.stats, scheduler.limits
        return Inspection(
            engine=self._engine,
            now_s=now,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            last_step=self.last_step,
            base=base,
            steps=tuple(records),
            gone_rows=tuple(row for row in self._sequences if row not in resident),
            requests=tuple(self._requests(now)),
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_preemptions=stats.num_preemptions,
            num_copies=manager.num_copies,
            num_merges=manager.num_merges,
            num_evictions=manager.num_evictions,
            waste=stats.waste,
        )

    @property
    def last_step(self) -> int:
        """The newest step that can be looked at."""
        return self._steps[-1].step if self._steps else self._base.step

    def content(self, block: int, step: int) -> BlockContent | None:
        """What a block held in a step; None where neither the step nor the block is known."""
        if not 0 <= block < self._scheduler.limits.num_blocks or not self._base.step <= step <= self.last_step:
            return None
        state = self._base.copy()
        for each in self._steps:
            if each.step > step:
                break
            state.apply(each)
        size = self._scheduler.limits.block_size
        owners, tokens, position = [], state.cached.get(block, ()), -1
        for row, blocks in state.blocks.items():
            if block in blocks:
                stream, position = state.streams[row], blocks.index(block) * size
                owners.append(stream.name)
                end = min(position + size, self._computed_at(row, step))
                tokens = max(tokens, tuple(stream.token_ids[position:end]), key=len)
        return BlockContent(block, step, tokens, tuple(owners), position, block in state.cached)

    def _first_positions(self) -> dict[int, int]:
        """Computed tokens of the base's rows: where each is next seen to go on."""
        positions: dict[int, int] = {}
        unknown = set(self._base.streams)
        for step in self._steps:
            if not unknown:
                return positions
            unknown.difference_update(row for row, _ in step.removed)
            for work in step.work:
                if work.row in unknown:
                    positions[work.row] = work.start
                    unknown.discard(work.row)
        for row in unknown:
            positions[row] = self._sequences[row].num_computed
        return positions

    def _computed_at(self, row: int, step: int) -> int:
        """Computed tokens of a row after a step."""
        computed = self._first_positions().get(row, 0)
        for each in self._steps:
            if each.step > step:
                break
            computed = next((work.start + work.num_tokens for work in each.work if work.row == row), computed)
        return computed

    def _base_record(self, positions: dict[int, int]) -> Base:
        state = self._base
        rows = (
            RowState(row, stream.name, stream.num_prompt_tokens, positions.get(row, 0), tuple(state.blocks[row]))
            for row, stream in state.streams.items()
        )
        return Base(state.step, tuple(rows), tuple(state.cached))

    def _records(self, positions: dict[int, int], since: int) -> Iterator[StepRecord]:
        positions = positions.copy()
        for step in self._steps:
            decoded, chunks, num_tokens = [], [], 0
            for entry in step.entered:
                positions.pop(entry.record.row, None)
            for row, start, count, num_samples, *_ in step.work:
                num_tokens += count
                if count == num_samples == 1 and positions.get(row) == start:
                    decoded.append(row)
                else:
                    chunks.append((row, start, count, num_samples))
                positions[row] = start + count
            if step.step > since:
                yield StepRecord(
                    step=step.step,
                    began_s=step.began_s,
                    elapsed_s=step.ended_s - step.began_s,
                    num_tokens=num_tokens,
                    removed=step.removed,
                    entered=tuple(entry.record for entry in step.entered),
                    replaced=tuple(map(tuple, step.replaced)),  # type: ignore[arg-type]
                    appended=tuple(map(tuple, step.appended)),  # type: ignore[arg-type]
                    copies=tuple(map(tuple, step.copies)),  # type: ignore[arg-type]
                    decoded=tuple(decoded),
                    chunks=tuple(chunks),
                    published=tuple(block for block, _ in step.published),
                    num_waiting=step.num_waiting,
                    waits_for=step.waits_for,
                )

    def _requests(self, now: float) -> Iterator[RequestState]:
        scheduler = self._scheduler
        for sequence in scheduler.running[:MAX_REQUESTS]:
            yield _request_state(sequence, now)
        waiting = scheduler.waiting.sequences()
        parked = [each for each in self._parked(set(waiting))]
        for place, sequence in enumerate([*parked, *waiting][: max(32, MAX_REQUESTS - len(scheduler.running))]):
            number = place - len(parked)
            reason = sequence.waits_for
            if number > 0:
                reason = f"{number} before it in the order of service"
            yield _request_state(sequence, now, reason or "the step in progress")

    def _parked(self, waiting: set[Sequence]) -> Iterator[Sequence]:
        if not self._scheduler.num_parked:
            return
        for request in self._scheduler.requests.values():
            for sequence in request.sequences:
                is_idle = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PARKED)
                if is_idle and sequence not in waiting:
                    yield sequence


def _end_of(sequence: Sequence | None) -> str:
    """Why a row was given up."""
    if sequence is None or sequence.status is not SequenceStatus.FINISHED or sequence.finish_reason is None:
        return "preempted"
    return sequence.finish_reason.value


def _request_state(sequence: Sequence, now: float, waits_for: str | None = None) -> RequestState:
    request = sequence.request
    return RequestState(
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
