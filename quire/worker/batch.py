"""The inputs of one forward pass, built from the rows and a plan's work."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.core.plan import RowWork
from quire.kernels.interface import AttentionBatch, SharedPrefixes
from quire.worker.prefixes import Run, find_runs, run_arrays
from quire.worker.rows import RowTable
from quire.worker.staging import Staging


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model is called with."""

    token_ids: Tensor
    """int64 [T]"""
    batch: AttentionBatch
    query_start: list[int]
    """Where each work's tokens begin, and the end: length work + 1."""


def build_inputs(rows: RowTable, work: Sequence[RowWork], stage: Staging, *, shared_unit: int | None = None) -> StepInputs:
    """Gather the step's tokens, positions and slots, in the order of the work, on the device that `stage` moves them to.

    No work, no call: `work` is not empty. `shared_unit` is `Kernels.shared_prefix_unit`.
    """
    row_ids, starts, counts = list(zip(*work, strict=True))[:3]
    sequence_rows = np.array(row_ids, np.int64)
    query_start = [0, *itertools.accumulate(counts)]
    max_query_len = max(counts)
    if max_query_len == 1:  # decodes only, the usual step
        token_rows, positions = sequence_rows, np.array(starts, np.int64)
    else:
        token_rows = np.repeat(sequence_rows, counts)
        first = np.subtract(starts, query_start[:-1])  # of each sequence: the position at place 0 of the batch, if it had one
        positions = np.arange(query_start[-1]) + np.repeat(first, counts)
    context_len = list(map(operator.add, starts, counts))
    max_context_len = max(context_len)
    block_places, offsets = np.divmod(positions, rows.block_size)
    slots = np.multiply(rows.block_tables[token_rows, block_places], rows.block_size, dtype=np.int64) + offsets
    num_columns = -(-max_context_len // rows.block_size)
    block_tables = rows.block_tables[sequence_rows, :num_columns]
    runs: list[Run] = []
    if shared_unit is not None and shared_unit % rows.block_size == 0 and max_context_len > shared_unit and len(work) > 1:
        num_known = [start // rows.block_size for start in starts]
        runs = find_runs(block_tables, num_known, shared_unit // rows.block_size)
    arrays = (
        np.array(query_start, np.int32),
        np.array(context_len, np.int32),
        block_tables,
        slots,
        positions,
        rows.token_ids[token_rows, positions].astype(np.int64),
    )
    of_runs = run_arrays(runs, block_tables, query_start, rows.block_size) if runs else ()
    starts_there, lengths, tables, slot_ids, places, token_ids, *of_runs_there = stage((*arrays, *of_runs))
    shared = SharedPrefixes(*of_runs_there) if runs else None
    batch = AttentionBatch(starts_there, lengths, tables, slot_ids, places, max_query_len, max_context_len, shared)
    return StepInputs(token_ids, batch, query_start)
