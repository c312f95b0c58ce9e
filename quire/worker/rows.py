"""Rows: what the worker remembers of each sequence between steps, so that a plan need only say what
changed.

Owns one dense table of token ids and one of block ids, indexed by row. It knows plans, not
requests, and no tensors: the null executor uses it as the real worker does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.common.numbers import ceil_div
from quire.core.plan import NewRow, RowSampling, RowWork, StepPlan, Verify, WorkResult

Int32Array = NDArray[np.int32]

_INITIAL_COLUMNS = 64


class RowTable:
    """`num_rows` rows; columns grow (by doubling) to the longest sequence seen."""

    def __init__(self, num_rows: int, block_size: int, num_groups: int = 1) -> None:
        """Each `block_size` tokens have a block of each of `num_groups` groups of layers."""
        self.block_size = block_size
        self.num_groups = num_groups
        self.token_ids: Int32Array = np.zeros((num_rows, _INITIAL_COLUMNS), np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.block_tables: Int32Array = np.zeros(
            (num_rows, num_groups * ceil_div(_INITIAL_COLUMNS, block_size)), np.int32
        )
        """Entries as in `NewRow.block_table`."""
        self.num_blocks: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.sampling: list[RowSampling] = [RowSampling()] * num_rows
        self.names: list[str] = [""] * num_rows

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows up to date with a plan's changes,
        in the order that `quire.core.plan` states."""
        for row in plan.removed_rows:
            self.num_tokens[row] = self.num_blocks[row] = 0
            self.sampling[row] = RowSampling()
        for new in plan.new_rows:
            self._begin(new)
        for appended in plan.appended_tokens:
            for token_id in appended.token_ids:
                self.append_token(appended.row, token_id)
        for row, entry, block in plan.replaced_blocks:
            self.block_tables[row, entry] = block
        for row, blocks in plan.appended_blocks:
            self._append_blocks(row, blocks)

    def append_token(self, row: int, token_id: int) -> None:
        """Add one known token: chosen by the control plane, or sampled here."""
        place = int(self.num_tokens[row])
        if place >= self.token_ids.shape[1]:
            self.token_ids = _widened(self.token_ids, place + 1)
        self.token_ids[row, place] = token_id
        self.num_tokens[row] = place + 1

    def append_result(self, work: RowWork, result: WorkResult) -> None:
        """Add what was sampled after the work's tokens, as far as those count; blocks that hold
        others alone are the row's no more."""
        row = work.row
        end = work.start + work.num_tokens - result.num_rejected
        if result.num_rejected:
            self.num_blocks[row] = ceil_div(end, self.block_size) * self.num_groups
        for token_id in result.token_ids[: end + 1 - int(self.num_tokens[row])]:
            self.append_token(row, token_id)

    def write_ahead(self, work: Sequence[RowWork]) -> None:
        """Put the tokens that tasks bring where they are to be computed, behind the known ones,
        whose number stays."""
        for item in work:
            for task in item.tasks:
                if isinstance(task, Verify):
                    end = item.start + item.num_tokens
                    if end > self.token_ids.shape[1]:
                        self.token_ids = _widened(self.token_ids, end)
                    self.token_ids[item.row, end - len(task.token_ids) : end] = task.token_ids

    def append_unread(self, row: int) -> None:
        """Add a token that was sampled but is on the device alone: -1 - row stands for it (see
        `quire.worker.last_tokens`).

        It is computed as the row's last one or never: a row that starts anew has its tokens from
        the control plane.
        """
        self.append_token(row, -1 - row)

    def tokens(self, row: int) -> Int32Array:
        """Return a view of the row's known tokens."""
        return self.token_ids[row, : self.num_tokens[row]]

    def slots(self, row: int, start: int, end: int, group: int = 0) -> NDArray[np.int64]:
        """Physical slots of the row's positions [start, end) in a group of layers."""
        positions = np.arange(start, end)
        entries = positions // self.block_size * self.num_groups + group
        blocks = self.block_tables[row, entries].astype(np.int64)
        slots: NDArray[np.int64] = blocks * self.block_size + positions % self.block_size
        return slots

    def _begin(self, new: NewRow) -> None:
        row, num_tokens = new.row, len(new.token_ids)
        if num_tokens > self.token_ids.shape[1]:
            self.token_ids = _widened(self.token_ids, num_tokens)
        self.token_ids[row, :num_tokens] = new.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_table)
        self.sampling[row], self.names[row] = new.sampling, new.name

    def _append_blocks(self, row: int, blocks: tuple[int, ...]) -> None:
        start = int(self.num_blocks[row])
        end = start + len(blocks)
        if end > self.block_tables.shape[1]:
            self.block_tables = _widened(self.block_tables, end)
        self.block_tables[row, start:end] = blocks
        self.num_blocks[row] = end


def _widened(table: Int32Array, num_columns: int) -> Int32Array:
    wider = np.zeros((table.shape[0], max(num_columns, 2 * table.shape[1])), np.int32)
    wider[:, : table.shape[1]] = table
    return wider
