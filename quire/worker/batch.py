"""The inputs of one forward pass, built from the rows and a plan's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.plan import RowWork
from quire.kernels.interface import AttentionBatch
from quire.worker.rows import RowTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model is called with."""

    token_ids: Tensor
    """int64 [T]"""
    batch: AttentionBatch
    query_start: list[int]
    """Where each work's tokens begin, and the end: length work + 1."""


def build_inputs(rows: RowTable, work: Sequence[RowWork]) -> StepInputs:
    """Gather the step's tokens, positions and slots, in the order of the work. No work, no call: `work` is not empty."""
    row_ids = np.fromiter((item.row for item in work), np.int64, len(work))
    starts = np.fromiter((item.start for item in work), np.int64, len(work))
    counts = np.fromiter((item.num_tokens for item in work), np.int64, len(work))
    query_start = np.zeros(len(work) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    context_len = starts + counts
    if int(query_start[-1]) == len(work):
        token_rows, positions = row_ids, starts
    else:
        token_rows = np.repeat(row_ids, counts)
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
    block_places, offsets = np.divmod(positions, rows.block_size)
    slots = rows.block_tables[token_rows, block_places].astype(np.int64) * rows.block_size + offsets
    max_context_len = int(context_len.max())
    num_columns = -(-max_context_len // rows.block_size)
    batch = AttentionBatch(
        query_start=torch.from_numpy(query_start.astype(np.int32)),
        context_len=torch.from_numpy(context_len.astype(np.int32)),
        block_tables=torch.from_numpy(np.ascontiguousarray(rows.block_tables[row_ids, :num_columns])),
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        max_query_len=int(counts.max()),
        max_context_len=max_context_len,
    )
    token_ids = torch.from_numpy(rows.token_ids[token_rows, positions].astype(np.int64))
    return StepInputs(token_ids, batch, query_start.tolist())
