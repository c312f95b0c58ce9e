"""What one step computes: decodes, chunks of prompts and admissions, until tokens, rows or blocks
run out; and which sequences memory is taken from.

Owns the plan in the making and the steps in flight. It moves sequences between the queue and the
running list, and knows nothing of requests that come or end.

Order within a step: sequences one token behind (decodes) first, each in the order of service; then
larger gaps of admitted sequences; then admissions, strictly in order. The last two change places
where chunked prefill is off, because a whole prompt would otherwise never find room beside the
decodes.
"""

from __future__ import annotations

import logging
from collections import deque

from quire.config.limits import SchedulerLimits
from quire.core.kvcache.prefix import NO_BLOCK
from quire.core.plan import ONE_SAMPLE, RowWork, StepPlan
from quire.core.request import FIRST_VERSION, Sequence, SequenceStatus
from quire.core.scheduler.admission import Admission
from quire.core.scheduler.flight import Flight
from quire.core.scheduler.look_ahead import LookAhead, OpenStep
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.plan_builder import PlanBuilder
from quire.core.scheduler.preemption import Preemption, assess, choose_victim
from quire.core.scheduler.prompts import PromptRoom
from quire.core.scheduler.resources import KVBlocks
from quire.core.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)


def _is_behind(sequence: Sequence) -> bool:
    """Return whether it has more to compute than the token that it decodes from."""
    return len(sequence.token_ids) - sequence.num_planned > 1 or sequence.num_reserved > 0


class StepPlanner:
    """Plans one step after another."""

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: KVBlocks,
        admission: Admission,
        stats: SchedulerStats,
        pace: StepPace | None,
        look_ahead: LookAhead | None,
    ) -> None:
        self.limits, self.blocks, self.admission, self.stats = limits, blocks, admission, stats
        self.manager, self.waiting, self.running = (
            blocks.manager,
            admission.waiting,
            admission.running,
        )
        self.pace, self.look_ahead = pace, look_ahead
        self.weight_version = FIRST_VERSION
        """What the weights are called that steps are computed with."""
        self.builder = PlanBuilder()
        self.step_id = 0
        """Of the last step that was planned."""
        self.flights: deque[Flight] = deque()
        """Steps in flight, the oldest first: one, or two where steps are planned ahead."""
        is_bound = pace is not None and pace.is_bounding and limits.enable_chunked_prefill
        self._prompts = PromptRoom(limits, self.builder, pace if is_bound else None)
        self._planned: list[Sequence] = []
        self._now = 0.0

    def decide(self, now: float) -> bool:
        """Fill the builder with the next step's work; returns whether there is any."""
        self._now, step_id = now, self.step_id + 1
        self.builder.open(self.limits.max_num_batched_tokens)
        self._make_room_for_urgent()
        if self.limits.enable_chunked_prefill:
            self._schedule_prompts(self._schedule_decodes())
        else:
            self._schedule_prompts(self.running)
            self._schedule_decodes()
        if not self.builder.work and not self.flights:
            self._break_stall()
        look_ahead = self.look_ahead
        if (
            look_ahead is not None
            and self.builder.work
            and (step_id >= look_ahead.wakes or self.builder.has_entered)
        ):
            step = OpenStep(
                step_id, self.limits, self.builder, self.blocks, self._planned,
                len(self.running),
            )  # fmt: skip
            look_ahead.extend(step)
        return bool(self.builder.work)

    def close(self) -> StepPlan:
        """Return the plan for what was decided; it is in flight from now on."""
        self.step_id += 1
        self.builder.copies.extend(self.blocks.take_copies())
        orders = self.admission.take_orders(self._now)
        if self.look_ahead is not None:
            orders |= self.look_ahead.take_orders()
        plan = self.builder.close(self.step_id, orders)
        planned, self._planned = self._planned, []
        pace = self.pace
        is_measured = pace is not None and pace.measures
        forecast = pace.forecast(plan.work) if pace is not None and is_measured else None
        self.flights.append(Flight(self.step_id, planned, forecast))
        self.waiting.charge(zip(planned, plan.work, strict=True))
        num_tokens = self.limits.max_num_batched_tokens - self.builder.num_tokens_left
        self.stats.count_plan(num_tokens, len(self.running), self.manager)
        return plan

    def _schedule_decodes(self) -> list[Sequence]:
        """Plan everyone who is one token behind; returns those found further behind.

        With hundreds of sequences nearly all of a step is this loop, so most are dealt with in a
        few operations each.
        """
        builder, behind, planned = self.builder, list[Sequence](), set(self._planned)
        work, add_planned, num_plain = builder.work, self._planned.append, 0
        max_work = len(work) + builder.num_tokens_left
        # growing may preempt others, which then leave the fast path
        for sequence in self.running.copy():
            if len(work) >= max_work:
                break
            start = sequence.num_planned
            if start < sequence.fast_plan_end:
                num_plain += 1
                sequence.table.num_filled = sequence.num_planned = start + 1
                # half the price of a call
                work.append(tuple.__new__(RowWork, (sequence.row, start, 1, ONE_SAMPLE)))
                add_planned(sequence)
            elif len(sequence.token_ids) - start > 1 or sequence.num_reserved:
                behind.append(sequence)
            elif sequence.gap == 1 and sequence.row >= 0 and sequence not in planned:
                self._schedule_decode(sequence)
        builder.num_tokens_left -= num_plain
        self.manager.num_unused_slots -= num_plain
        return behind

    def _schedule_decode(self, sequence: Sequence) -> None:
        request, start = sequence.request, sequence.num_planned
        if sequence.is_resident and self.manager.fill_slot(sequence.table, start):
            self.builder.add_decode(sequence)
            self._planned.append(sequence)
        else:
            self._grow(sequence)
        table, num_prompt = sequence.table, len(request.prompt_token_ids)
        is_planned = table.num_filled == start + 1  # it may have been preempted, or have to stall
        if (
            is_planned
            and start >= num_prompt
            and request.strategy.is_plain
            and self.manager.is_own(table, start)
        ):
            num_slots = self.manager.num_places(table) * self.limits.block_size
            sequence.fast_plan_end = min(num_slots, num_prompt + request.max_tokens - 1)

    def _grow(self, sequence: Sequence) -> None:
        """Give a decode a new block for its next token, preempting another sequence if need be.

        Where it must not be preempted itself, it stalls until a protected prefill has made
        progress.
        """
        start = sequence.num_planned
        if self.manager.has_windows:
            self._give_back(sequence)
        while True:
            num_needed = self.manager.num_needed(sequence.table, start, start + 1)
            if num_needed <= self.blocks.num_available:
                self._plan(sequence, 1)
                return
            place = self.running.index(sequence)
            planned = set(self._planned)
            others = [s for s in self.running[place + 1 :] if s not in planned]
            preemption = choose_victim(others, sequence, self.manager)
            if preemption is None:
                if not any(not s.has_progressed for s in self.running):
                    self._preempt(choose_victim([sequence], None, self.manager))
                return
            self._preempt(preemption)

    def _schedule_prompts(self, behind: list[Sequence]) -> None:
        """Give prompts their share of the step: those of admitted sequences,
        then of those that can be admitted."""
        if not behind and not self.waiting:
            return
        context_len = behind[0].num_planned if behind else 0
        longest_gap = max((sequence.gap for sequence in behind), default=0)
        self._prompts.open(self.builder.work, self._queued_len(behind), context_len, longest_gap)
        if self.limits.max_num_partial_prefills > 1:
            self._prompts.serve_short()
            self._schedule_chunks(behind)
            self._admit()
            self._prompts.serve_long()
            behind = list(filter(_is_behind, self.running))
        self._schedule_chunks(behind)
        self._admit()

    def _queued_len(self, behind: list[Sequence]) -> int:
        """Length of the prompt that waits behind the one to be served first; 0 where none does."""
        if len(behind) > 1:
            return len(behind[1].token_ids)
        head = self.waiting.head() if behind or len(self.waiting) > 1 else None
        return 0 if head is None else len(head.token_ids)

    def _schedule_chunks(self, sequences: list[Sequence]) -> None:
        planned = set(self._planned)
        for sequence in self.waiting.in_order(sequences):
            self._admit(before=sequence)
            if self.builder.num_tokens_left == 0:
                break
            if (
                _is_behind(sequence)
                and sequence.gap
                and sequence.row >= 0
                and sequence not in planned
            ):
                self._plan_chunk(sequence)

    def _plan_chunk(self, sequence: Sequence) -> None:
        count = self._prompts.take(sequence.num_planned, sequence.gap, sequence.request.undivided)
        if count:
            metrics = sequence.request.metrics
            if metrics.first_scheduled_s is None:
                metrics.first_scheduled_s = self._now
                metrics.num_waited_steps = self.step_id - sequence.request.arrival_step
            metrics.num_prefill_chunks += 1
            metrics.note_version(self.weight_version)
            if self.manager.has_windows:
                self._give_back(sequence)
            self._plan(sequence, count)

    def _plan(self, sequence: Sequence, count: int) -> None:
        """Put `count` tokens of a sequence into the step;
        the blocks they need are known to be there."""
        start = sequence.num_planned
        change = self.manager.extend(sequence.table, start, start + count)
        if sequence.num_reserved:
            self.blocks.settle(sequence)
        self.builder.add(sequence, count, change)
        self._planned.append(sequence)

    def _admit(self, before: Sequence | None = None) -> None:
        """Admit waiting sequences that can run; only those that precede an admitted sequence,
        if one is given."""
        if self.builder.num_preempted:
            # memory is short: a sequence preempted in this step would only be let in at the cost
            # of another one
            return
        while self._prompts.has_room:
            sequence = self.admission.admit_next(self.builder.num_tokens_left, before)
            if sequence is None:
                return
            self._plan_chunk(sequence)

    def _make_room_for_urgent(self) -> None:
        """Preempt running sequences that the policy puts behind a waiting one."""
        while (preemption := self.admission.displacement()) is not None:
            self._preempt(preemption)
            self.builder.num_preempted -= 1  # the head is to be admitted in this very step

    def _break_stall(self) -> None:
        """Preempt where nothing can run though sequences wait:
        siblings that wait for one of them hold the memory it needs."""
        while not self.builder.work and len(self.waiting) and self.running:
            preemption = choose_victim(self.running[-1:], None, self.manager)
            if preemption is None:
                return
            self._preempt(preemption)
            self.builder.num_preempted = 0
            self._admit()

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's row and blocks, needed or not; it is computed again from its tokens."""
        self._preempt(assess(sequence, None, self.manager))

    def _preempt(self, preemption: Preemption | None) -> None:
        assert preemption is not None
        victim = preemption.victim
        assert preemption.beneficiary is None or victim.has_progressed, (
            f"{victim.name} is preempted again without having gained a token"
        )
        logger.info("%s", preemption.reason())
        is_waiting_for_siblings = victim.num_computed == len(victim.token_ids)
        self.leave(victim)
        victim.request.metrics.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.stats.num_recompute_tokens += preemption.num_recomputed_tokens
        self.builder.num_preempted += 1
        if is_waiting_for_siblings:
            self.admission.set_aside(victim)
        else:
            victim.status = SequenceStatus.WAITING
            victim.waits_for = preemption.reason()
            self.waiting.push(victim)

    def _give_back(self, sequence: Sequence) -> None:
        """Take back the blocks that nothing reads any more from a sequence that is about to grow.

        Steps in flight may still read them: what is planned from now on is computed later.
        """
        for entry in self.manager.give_back(sequence.table, sequence.num_computed):
            if sequence.is_resident:
                self.builder.replace_block(sequence.row, entry, NO_BLOCK)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is, with everything it holds."""
        sequence.fast_plan_end = sequence.fast_update_end = 0
        if sequence.num_planned > sequence.num_computed:
            for flight in self.flights:
                flight.gone.add(sequence)
        if sequence.is_resident:
            self.builder.remove_row(sequence.row)
            sequence.is_resident = False
        self.admission.leave(sequence)
