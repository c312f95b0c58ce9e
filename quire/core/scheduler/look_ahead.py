"""Steps that compute more than is known: tokens that may come next, on top of a step that has room.

The scheduler offers each step, once it holds all that has to be in it, to a `LookAhead`. What that
adds behind a row's known tokens is computed as if it were known, and a task says how much of it
counts. It takes only what is left: tokens of the step's budget, rows of logits, and
blocks beyond those that the running sequences may need for their next tokens.
"""

from __future__ import annotations

from collections import abc
from typing import Protocol

from quire.config.limits import MAX_SCORED_ROWS, SchedulerLimits
from quire.core.plan import Record, RowWork, StepPlan, StepResult, Task
from quire.core.request import Sequence
from quire.core.scheduler.plan_builder import PlanBuilder
from quire.core.scheduler.resources import KVBlocks


class OpenStep:
    """A step that is complete and may have more: work and whose it is, in the same order."""

    def __init__(
        self,
        step_id: int,
        limits: SchedulerLimits,
        builder: PlanBuilder,
        blocks: KVBlocks,
        sequences: abc.Sequence[Sequence],
        num_running: int,
    ) -> None:
        self.step_id = step_id
        self.sequences = sequences
        self._builder, self._blocks = builder, blocks
        self._num_kept = num_running
        """Places for which blocks are left: one for the next token of each."""
        self._num_rows = max(limits.max_num_seqs, MAX_SCORED_ROWS) - len(builder.work)
        """Of logits, for which there is memory."""
        num_tokens = limits.max_num_batched_tokens - builder.num_tokens_left
        self._has_decodes_alone = num_tokens == len(builder.work) and not builder.has_entered

    @property
    def has_decodes_alone(self) -> bool:
        """Whether each row computes one token that it has, and what this object has added."""
        return self._has_decodes_alone

    @property
    def entering_rows(self) -> set[int]:
        """Rows whose sequences have their first work, or their first since they were preempted."""
        return self._builder.entering_rows

    @property
    def work(self) -> abc.Sequence[RowWork]:
        """What the step computes so far."""
        return self._builder.work

    def room(self, sequence: Sequence) -> int:
        """How many tokens it may compute beyond the next one: also so that it never computes one
        that it may not have."""
        request, manager = sequence.request, self._blocks.manager
        num_allowed = len(request.prompt_token_ids) + request.max_tokens - 1 - sequence.num_planned
        if num_allowed <= 0:
            return 0
        num_places = manager.num_places(sequence.table)
        num_places += max(0, self._blocks.num_available // manager.num_groups - self._num_kept)
        num_slots = num_places * manager.block_size - sequence.num_planned
        return min(num_allowed, num_slots, self._builder.num_tokens_left, self._num_rows)

    def extend(self, place: int, tasks: tuple[Task, ...], count: int) -> None:
        """Compute `count` tokens more, at most `room`, of the sequence at a place, and do these
        tasks with all of it. The tasks bring the tokens."""
        sequence = self.sequences[place]
        start = sequence.num_planned
        change = self._blocks.manager.extend(sequence.table, start, start + count)
        self._builder.lengthen(place, sequence, change, count, tasks)
        sequence.fast_update_end = 0
        self._num_rows -= count


class LookAhead(Protocol):
    """Adds to steps what may save later ones. Results never depend on it."""

    @property
    def wakes(self) -> int:
        """The next step that it has to be offered, or one before it; steps with sequences that
        enter are offered in any case."""
        ...

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step must not be planned before the tokens of the last one offered are
        known: in any case where that one was extended. Then it is to be offered, too."""
        ...

    def extend(self, step: OpenStep) -> None:
        """Add to a step."""
        ...

    def take_orders(self) -> dict[str, tuple[Record, ...]]:
        """What the plan of the step orders of the worker's companions, by their names."""
        ...

    def taken_in(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Learn what came of a step, offered or not. Steps come in their order."""
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; it need not be known here."""
        ...
