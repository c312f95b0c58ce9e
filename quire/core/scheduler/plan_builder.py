"""A step plan in the making: collects work and row changes, between steps as well,
until the plan is closed."""

from __future__ import annotations

from quire.core.kvcache.manager import UNCHANGED, TableChange
from quire.core.plan import (
    AppendedBlocks,
    AppendedTokens,
    BlockCopy,
    NewRow,
    Record,
    ReplacedBlock,
    RowWork,
    ScorePrompt,
    StepPlan,
    Task,
)
from quire.core.request import Sequence


class PlanBuilder:
    """Row changes made by an update (merged blocks, tokens chosen by a strategy, finished rows)
    wait here for the next plan."""

    def __init__(self) -> None:
        self.num_tokens_left = 0
        self.num_preempted = 0
        self.work: list[RowWork] = []
        self.copies: list[BlockCopy] = []
        self._removed: list[int] = []
        self._new: list[NewRow] = []
        self._tokens: list[AppendedTokens] = []
        self._blocks: list[AppendedBlocks] = []
        self._replaced: list[ReplacedBlock] = []

    @property
    def has_entered(self) -> bool:
        """Whether a sequence takes a row in the next plan."""
        return bool(self._new)

    @property
    def entering_rows(self) -> set[int]:
        """Rows that sequences take in the next plan."""
        return {new.row for new in self._new}

    def open(self, num_tokens: int) -> None:
        """Begin a step of at most `num_tokens` tokens."""
        self.num_tokens_left = num_tokens
        self.num_preempted = 0

    def append_token(self, row: int, token_id: int) -> None:
        self._tokens.append(AppendedTokens(row, (token_id,)))

    def replace_block(self, row: int, entry: int, block: int) -> None:
        self._replaced.append(ReplacedBlock(row, entry, block))

    def remove_row(self, row: int) -> None:
        """Free the row; changes to it that no plan has carried yet are void."""
        self._removed.append(row)
        if self._tokens:
            self._tokens = [change for change in self._tokens if change.row != row]
        if self._replaced:
            self._replaced = [change for change in self._replaced if change.row != row]

    def add(self, sequence: Sequence, count: int, change: TableChange) -> None:
        """Add work for a sequence, with what the worker must learn before it."""
        row, start = sequence.row, sequence.num_planned
        if change.copies:
            self.copies += change.copies
        if not sequence.is_resident:
            sequence.is_resident = True
            request = sequence.request
            self._new.append(
                NewRow(
                    row,
                    sequence.name,
                    tuple(sequence.token_ids),
                    len(request.prompt_token_ids),
                    tuple(sequence.table.blocks),
                    sequence.sampling,
                )
            )
        elif change is not UNCHANGED:
            if change.copies:
                for entry, copy in enumerate(change.copies, change.replaced_index):
                    self._replaced.append(ReplacedBlock(row, entry, copy.destination))
            if change.appended:
                self._blocks.append(AppendedBlocks(row, change.appended))
        self.work.append(self._row_work(sequence, start, count))
        sequence.num_planned = start + count
        self.num_tokens_left -= count

    def add_decode(self, sequence: Sequence) -> None:
        """Add one more token of a sequence that is one behind and of which
        the worker knows everything."""
        self.work.append(
            RowWork(
                sequence.row, sequence.num_planned, 1, sequence.request.strategy.tasks(sequence)
            )
        )
        sequence.num_planned += 1
        self.num_tokens_left -= 1

    def lengthen(
        self,
        place: int,
        sequence: Sequence,
        change: TableChange,
        count: int,
        tasks: tuple[Task, ...],
    ) -> None:
        """Have the work at a place compute `count` tokens more, and do other tasks."""
        row, start, num_tokens, _ = self.work[place]
        assert not change.copies, "the block before is not the row's own"
        self.work[place] = RowWork(row, start, num_tokens + count, tasks)
        if change.appended:
            self._blocks.append(AppendedBlocks(row, change.appended))
        sequence.num_planned += count
        self.num_tokens_left -= count

    def close(self, step_id: int, orders: dict[str, tuple[Record, ...]]) -> StepPlan:
        """Return the finished plan; the builder is empty again."""
        plan = StepPlan(
            step_id,
            tuple(self.work),
            tuple(self._removed),
            tuple(self._new),
            tuple(self._tokens),
            tuple(self._replaced),
            tuple(self._blocks),
            tuple(self.copies),
            orders,
        )
        for changes in (
            self.work,
            self._removed,
            self._new,
            self._tokens,
            self._replaced,
            self._blocks,
            self.copies,
        ):
            changes.clear()
        return plan

    @staticmethod
    def _row_work(sequence: Sequence, start: int, count: int) -> RowWork:
        request, end = sequence.request, start + count
        tasks: tuple[Task, ...] = request.strategy.early_tasks
        # one beyond them where a step in flight samples the token that this one computes
        if end >= len(sequence.token_ids):
            tasks = request.strategy.tasks(sequence)
        if start < len(request.prompt_token_ids) and request.scoring is not None:
            first_unscored = len(request.prompt_logprobs)
            if first_unscored <= end and first_unscored < len(request.prompt_token_ids):
                tasks += (ScorePrompt(first_unscored),)
        return RowWork(sequence.row, start, count, tasks)
