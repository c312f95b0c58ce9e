"""Inputs of a step: every token, position and slot where the plan says, for any mix of work."""

from __future__ import annotations

import random

import pytest
import torch

from quire.core.plan import ONE_SAMPLE, NewRow, RowSampling, RowWork, StepPlan
from quire.worker.batch import gather, move
from quire.worker.rows import RowTable
from quire.worker.staging import Staging

BLOCK_SIZE = 4
LENGTHS = {0: 9, 2: 1, 3: 23, 5: 8}


@pytest.fixture
def rows() -> RowTable:
    """Rows of these lengths; token 100 * row + position, and blocks that nobody shares."""
    table = RowTable(8, BLOCK_SIZE)
    new = tuple(
        NewRow(
            row=row,
            name=str(row),
            token_ids=tuple(100 * row + position for position in range(length)),
            num_prompt_tokens=length,
            block_table=tuple(10 * row + place for place in range(-(-length // BLOCK_SIZE))),
            sampling=RowSampling(),
        )
        for row, length in LENGTHS.items()
    )
    table.apply(StepPlan(0, new_rows=new))
    return table


def _check(rows: RowTable, work: list[RowWork]) -> None:
    inputs = move(gather(rows, work), BLOCK_SIZE, Staging(torch.device("cpu")))
    expected = [
        (item.row, position)
        for item in work
        for position in range(item.start, item.start + item.num_tokens)
    ]
    assert inputs.token_ids.tolist() == [100 * row + position for row, position in expected]
    assert inputs.batch.positions.tolist() == [position for _, position in expected]
    assert inputs.batch.slots.tolist() == [
        (10 * row + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
        for row, position in expected
    ]
    ends = [item.start + item.num_tokens for item in work]
    assert inputs.batch.context_len.tolist() == ends and inputs.batch.max_context_len == max(ends)
    assert inputs.batch.query_start.tolist() == inputs.query_start
    assert [b - a for a, b in zip(inputs.query_start, inputs.query_start[1:], strict=False)] == [
        w.num_tokens for w in work
    ]
    assert inputs.batch.max_query_len == max(item.num_tokens for item in work)
    for item, table in zip(work, inputs.batch.block_tables.tolist(), strict=True):
        num_blocks = -(-(item.start + item.num_tokens) // BLOCK_SIZE)
        assert table[:num_blocks] == [10 * item.row + place for place in range(num_blocks)]
    for tensor in (
        inputs.token_ids,
        inputs.batch.slots,
        inputs.batch.positions,
        inputs.batch.block_tables,
    ):
        assert tensor.is_contiguous()


@pytest.mark.parametrize("rows_in_order", [[0], [2], [3, 0], [5, 2, 3, 0]])
def test_decodes(rows: RowTable, rows_in_order: list[int]) -> None:
    _check(rows, [RowWork(row, LENGTHS[row] - 1, 1, tasks=ONE_SAMPLE) for row in rows_in_order])


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_pieces_and_decodes(rows: RowTable, seed: int) -> None:
    rng = random.Random(seed)
    work = []
    for row in rng.sample(list(LENGTHS), rng.randint(1, 4)):
        start = rng.randrange(LENGTHS[row])
        work.append(RowWork(row, start, rng.randint(1, LENGTHS[row] - start)))
    _check(rows, work)
