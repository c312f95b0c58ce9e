"""The outlet for vectors: takes in a prompt's hidden states chunk by chunk, and makes a vector of
them at its end.

Owns what is known of prompts that are under way, by row. A prompt that is computed again begins at
position 0, and so does what is known of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.core.plan import RowWork, WorkResult
from quire.core.pooling import Pool
from quire.nn.pooler import Float32, Pooled, Pooler
from quire.worker.outlets.interface import TaskBatch, Unread
from quire.worker.rows import RowTable
from quire.worker.staging import Staging


class _Known(NamedTuple):
    """States of a prompt that become vectors."""

    number: int
    """Of the task among its batch's."""
    task: Pool
    pooled: Pooled
    states: Float32
    is_end: bool


class PoolOutlet:
    """Implements `Outlet`. Vectors leave it as little-endian float32."""

    tasks = (Pool,)

    def __init__(self, pooler: Pooler, rows: RowTable, stage: Staging) -> None:
        self._pooler = pooler
        self._rows = rows
        self._stage = stage
        self._pooled: dict[int, Pooled] = {}

    def launch(self, batch: TaskBatch) -> list[WorkResult]:
        chunks = self._chunks(batch)
        results = [WorkResult()] * len(batch.tasks)
        known: list[_Known] = []
        begun: dict[int, Pooled] = {}
        for number, (place, task, chunk) in enumerate(
            zip(batch.places, batch.tasks, chunks, strict=True)
        ):
            assert isinstance(task, Pool)
            work = batch.hidden.work[place]
            pooled = begun[work.row] = self._taken(work, task, chunk)
            is_end = work.start + work.num_tokens >= int(self._rows.num_prompt_tokens[work.row])
            if is_end:
                del begun[work.row]
            states = self._states(work, task, pooled, chunk, is_end=is_end)
            if is_end or len(states):
                known.append(_Known(number, task, pooled, states, is_end))
        self._finish(known, results)
        # Where something raises before this, each row is computed once more.
        for work in batch.work:
            self._pooled.pop(work.row, None)
        self._pooled |= begun
        return results

    def launch_unread(self, batch: TaskBatch) -> Unread | None:
        return None

    def _chunks(self, batch: TaskBatch) -> list[Float32]:
        """The states that each task wants, behind the final norm, by one call for all of them."""
        ends = [batch.hidden.query_start[place + 1] for place in batch.places]
        counts = [
            task.num_wanted(work.num_tokens)
            for task, work in zip(batch.tasks, batch.work, strict=True)
        ]
        states = self._pooler.states(self._selected(batch.hidden.states, ends, counts))
        return np.split(states, np.cumsum(counts)[:-1])

    def _selected(self, states: Tensor, ends: Sequence[int], counts: Sequence[int]) -> Tensor:
        if sum(counts) == len(states):
            return states
        places = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        (rows,) = self._stage((np.concatenate(places).astype(np.int64),))
        return states.index_select(0, rows)

    def _taken(self, work: RowWork, task: Pool, chunk: Float32) -> Pooled:
        """Return what is known of a prompt with one more chunk."""
        known = self._pooled.get(work.row) if task.is_whole and work.start else None
        pooled = Pooled() if known is None else replace(known, vectors=known.vectors.copy())
        if not task.is_per_token:
            chunk = _unskipped(work, task, chunk)
            if len(chunk):
                self._pooler.take(pooled, chunk)
        return pooled

    def _states(
        self, work: RowWork, task: Pool, pooled: Pooled, chunk: Float32, *, is_end: bool
    ) -> Float32:
        """Return the states [n, H] that become vectors now: each token's where each has one, so
        that no more is kept of a text than its vectors; else, at the end, the pooled one."""
        if task.is_per_token:
            return _unskipped(work, task, chunk)
        return self._pooler.vector(pooled)[None] if is_end else chunk[:0]

    def _finish(self, known: Sequence[_Known], results: list[WorkResult]) -> None:
        """Make vectors of states, by one call for all of them."""
        if not known:
            return
        outputs = self._pooler.outputs(np.concatenate([each.states for each in known]))
        ends = np.cumsum([len(each.states) for each in known])[:-1]
        for each, rows in zip(known, np.split(outputs, ends), strict=True):
            each.pooled.vectors.append(self._encoded(each.task, rows))
            if each.is_end:
                results[each.number] = WorkResult(pooled=b"".join(each.pooled.vectors))

    def _encoded(self, task: Pool, rows: Float32) -> bytes:
        finished = [
            self._pooler.finished(row, task.dimensions, is_activated=task.is_activated)
            for row in rows
        ]
        return b"".join(row.astype("<f4").tobytes() for row in finished)


def _unskipped(work: RowWork, task: Pool, chunk: Float32) -> Float32:
    """The states of a chunk that count."""
    return chunk[max(0, task.num_skipped - work.start) :] if task.is_whole else chunk
