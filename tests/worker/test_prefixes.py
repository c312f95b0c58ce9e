"""Runs of neighbours that begin with the same blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.core.plan import NewRow, RowSampling, RowWork, StepPlan
from quire.worker.batch import gather, move
from quire.worker.prefixes import PrefixRun, find_runs, run_arrays
from quire.worker.rows import RowTable
from quire.worker.staging import Staging

TABLES = np.array(
    [
        [1, 2, 3, 4, 50],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 9, 5],
        [6, 2, 8, 9, 5],
        [7, 7, 1, 2, 3],
        [7, 7, 1, 2, 3],
    ],
    np.int32,
)


@pytest.mark.parametrize(
    ("num_known", "unit", "expected"),
    [
        # The fourth is alike where one looks first, and not before.
        ([4] * 6, 2, [PrefixRun(0, 4, 0), PrefixRun(4, 6, 4)]),
        ([4, 4, 4, 1, 4, 5], 2, [PrefixRun(0, 3, 2), PrefixRun(3, 4, 0), PrefixRun(4, 6, 4)]),
        ([4, 4, 3, 0, 1, 1], 1, [PrefixRun(0, 3, 3), PrefixRun(3, 4, 0), PrefixRun(4, 6, 1)]),
        (
            [4, 4, 0, 0, 0, 0],
            4,
            [PrefixRun(0, 2, 4), *(PrefixRun(alone, alone + 1, 0) for alone in range(2, 6))],
        ),
        ([1] * 6, 2, []),
        ([9] * 6, 6, []),
    ],
)
def test_runs(num_known: list[int], unit: int, expected: list[PrefixRun]) -> None:
    assert find_runs(TABLES, num_known, unit) == expected


def test_arrays_of_runs() -> None:
    runs = [PrefixRun(0, 3, 2), PrefixRun(3, 4, 0)]
    starts, contexts, tables, shared, known = run_arrays(
        runs, TABLES[:4], [0, 1, 3, 4, 9], block_size=8
    )
    assert starts.tolist() == [0, 4, 9] and contexts.tolist() == [20, 5]
    assert (
        tables.tolist() == [[1, 2], [6, 2]]
        and shared.tolist() == [16, 0]
        and known.tolist() == [16, 16, 16, 0]
    )


def test_a_batch_says_what_is_shared_where_a_back_end_asks() -> None:
    rows = RowTable(4, 4)
    blocks = ((1, 2, 3), (1, 2, 4), (5, 6, 7))
    new = tuple(
        NewRow(row, str(row), tuple(range(10)), 10, table, RowSampling())
        for row, table in enumerate(blocks)
    )
    rows.apply(StepPlan(0, new_rows=new))
    work = [RowWork(0, 9, 1), RowWork(1, 8, 2), RowWork(2, 0, 10)]
    stage = Staging(torch.device("cpu"))
    assert move(gather(rows, work), 4, stage).batch.shared is None
    # not whole blocks
    assert move(gather(rows, work, shared_unit=6), 4, stage).batch.shared is None
    shared = move(gather(rows, work, shared_unit=8), 4, stage).batch.shared
    assert shared is not None
    assert shared.query_start.tolist() == [0, 3, 13] and shared.shared_len.tolist() == [8, 0]
    assert shared.context_len.tolist() == [11, 10] and shared.known_len.tolist() == [8, 8, 0]
    assert shared.block_tables.tolist() == [[1, 2], [5, 6]]
