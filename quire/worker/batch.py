"""The inputs of one forward pass: gathered on the host from the rows and a plan's work,
then moved to the device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import RowWork
from quire.kernels.interface import AttentionBatch, SharedPrefixes
from quire.worker.prefixes import PrefixRun, find_runs, run_arrays
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
    num_wanted: Tensor | None = None
    """int32 [S], on the host: as `ForwardPass` takes it."""
    rows: Sequence[int] | None = None
    """Of each sequence."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The same on the host, T tokens of S sequences; fields as those of `AttentionBatch`, but for
    the G groups of layers together."""

    query_start: NDArray[np.int32]
    context_len: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    """[G, S, places]"""
    slots: NDArray[np.int64]
    """[G, T]"""
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    max_query_len: int
    max_context_len: int
    runs: tuple[PrefixRun, ...] = ()
    """Sequences that begin with the same blocks; empty where none do."""
    num_wanted: NDArray[np.int32] | None = None
    """Of each sequence, how many of its last tokens' hidden states are wanted; None:
    all of them. Stays on the host."""
    rows: tuple[int, ...] | None = None
    """Of each sequence. Stays on the host."""

    @property
    def parts(self) -> tuple[NDArray[Any], ...]:
        """The arrays, in the order of the fields."""
        return (
            self.query_start,
            self.context_len,
            self.block_tables,
            self.slots,
            self.positions,
            self.token_ids,
        )

    def on_device(self, tensors: Sequence[Tensor]) -> StepInputs:
        """Return `parts`, and behind them what `run_arrays` gives, as tensors."""
        starts, lengths, tables, slots, places, token_ids, *of_runs = tensors
        others = tuple(
            AttentionBatch(
                starts, lengths, tables[group], slots[group], places, self.max_query_len,
                self.max_context_len,
            )
            for group in range(1, len(tables))
        )  # fmt: skip
        shared = SharedPrefixes(*of_runs) if of_runs else None
        batch = AttentionBatch(
            starts, lengths, tables[0], slots[0], places, self.max_query_len, self.max_context_len,
            shared, others,
        )  # fmt: skip
        return StepInputs(token_ids, batch, self.query_start.tolist())


def move(arrays: StepArrays, block_size: int, stage: Staging) -> StepInputs:
    """Move the inputs to the device of `stage`."""
    query_start = arrays.query_start.tolist()
    of_runs = (
        run_arrays(arrays.runs, arrays.block_tables[0], query_start, block_size)
        if arrays.runs
        else ()
    )
    inputs = arrays.on_device(stage((*arrays.parts, *of_runs)))
    wanted = None if arrays.num_wanted is None else torch.from_numpy(arrays.num_wanted)
    return replace(inputs, num_wanted=wanted, rows=arrays.rows)


def gather(
    rows: RowTable, work: Sequence[RowWork], *, shared_unit: int | None = None
) -> StepArrays:
    """Gather the step's tokens, positions and slots, in the order of the work.

    No work, no call: `work` is not empty. `shared_unit` is `Kernels.shared_prefix_unit`, or None
    where the first group of layers has a window.
    """
    row_ids, starts, counts = list(zip(*work, strict=True))[:3]
    sequence_rows = np.array(row_ids, np.int64)
    query_start = [0, *itertools.accumulate(counts)]
    max_query_len = max(counts)
    if max_query_len > 1:
        rows.write_ahead(work)
    if max_query_len == 1:  # decodes only, the usual step
        token_rows, positions = sequence_rows, np.array(starts, np.int64)
    else:
        token_rows = np.repeat(sequence_rows, counts)
        # of each sequence: the position at place 0 of the batch, if it had one
        first = np.subtract(starts, query_start[:-1])
        positions = np.arange(query_start[-1]) + np.repeat(first, counts)
    context_len = list(map(operator.add, starts, counts))
    max_context_len = max(context_len)
    if max_query_len > 1:
        unseen = [rows.sampling[row].num_unseen for row in row_ids]
        context_len = list(map(operator.sub, context_len, unseen))
    num_groups, num_places = rows.num_groups, -(-max_context_len // rows.block_size)
    places, offsets = np.divmod(positions, rows.block_size)
    entries = places * num_groups + np.arange(num_groups)[:, None]
    blocks = rows.block_tables[token_rows, entries]
    slots = np.multiply(blocks, rows.block_size, dtype=np.int64) + offsets
    tables = rows.block_tables[sequence_rows, : num_places * num_groups]
    block_tables = np.ascontiguousarray(
        tables.reshape(len(work), num_places, num_groups).transpose(2, 0, 1)
    )
    runs: list[PrefixRun] = []
    if (
        shared_unit is not None
        and shared_unit % rows.block_size == 0
        and max_context_len > shared_unit
        and len(work) > 1
    ):
        num_known = [start // rows.block_size for start in starts]
        runs = find_runs(block_tables[0], num_known, shared_unit // rows.block_size)
    return StepArrays(
        query_start=np.array(query_start, np.int32),
        context_len=np.array(context_len, np.int32),
        block_tables=block_tables,
        slots=slots,
        positions=positions,
        token_ids=rows.token_ids[token_rows, positions].astype(np.int64),
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        runs=tuple(runs),
        num_wanted=None
        if max_query_len == 1
        else np.array([item.num_wanted for item in work], np.int32),
        rows=row_ids,
    )
