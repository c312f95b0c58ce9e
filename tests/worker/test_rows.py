"""Rows follow plans."""

from __future__ import annotations

import numpy as np

from quire.core.plan import (
    AppendedBlocks,
    AppendedTokens,
    NewRow,
    ReplacedBlock,
    RowSampling,
    StepPlan,
)
from quire.worker.rows import RowTable


def _table() -> RowTable:
    rows = RowTable(3, 4)
    rows.apply(StepPlan(1, new_rows=(NewRow(1, "a", (5, 6, 7), 2, (9, 8), RowSampling(seed=3)),)))
    return rows


def test_a_new_row_is_known_completely() -> None:
    rows = _table()
    assert rows.tokens(1).tolist() == [5, 6, 7] and rows.num_prompt_tokens[1] == 2
    assert rows.num_blocks[1] == 2 and rows.names[1] == "a" and rows.sampling[1].seed == 3
    assert rows.num_tokens.tolist() == [0, 3, 0]


def test_slots_go_through_the_block_table() -> None:
    assert _table().slots(1, 2, 6).tolist() == [38, 39, 32, 33]
    assert _table().slots(1, 2, 2).tolist() == []


def test_changes_are_applied_in_the_documented_order() -> None:
    rows = _table()
    rows.apply(
        StepPlan(
            2,
            removed_rows=(1,),
            new_rows=(NewRow(1, "b", (1, 2, 3, 4), 4, (0, 1), RowSampling()),),
            appended_tokens=(AppendedTokens(1, (11, 12)),),
            replaced_blocks=(ReplacedBlock(1, 1, 7),),
            appended_blocks=(AppendedBlocks(1, (2, 3)),),
        )
    )
    assert rows.tokens(1).tolist() == [1, 2, 3, 4, 11, 12] and rows.names[1] == "b"
    assert rows.block_tables[1, :4].tolist() == [0, 7, 2, 3]


def test_a_removed_row_is_empty() -> None:
    rows = _table()
    rows.apply(StepPlan(2, removed_rows=(1,)))
    assert rows.num_tokens[1] == rows.num_blocks[1] == 0 and rows.sampling[1] == RowSampling()


def test_tables_widen_and_keep_what_they_hold() -> None:
    rows = _table()
    for token_id in range(300):
        rows.append_token(1, token_id)
    rows.apply(StepPlan(2, appended_blocks=(AppendedBlocks(1, tuple(range(100))),)))
    assert rows.tokens(1).tolist() == [5, 6, 7, *range(300)]
    assert rows.block_tables[1, :102].tolist() == [9, 8, *range(100)]
    rows.apply(
        StepPlan(
            3,
            new_rows=(
                NewRow(2, "long", tuple(range(5000)), 5000, tuple(range(1250)), RowSampling()),
            ),
        )
    )
    assert np.array_equal(rows.tokens(2), np.arange(5000)) and rows.tokens(1)[0] == 5
