"""The outlet for vectors: takes in a prompt's hidden states chunk by chunk, and makes a vector of
them at its end.

Owns what is known of prompts that are under way, by row. A prompt that is computed again begins at
position 0, and so does what is known of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from quire.core.plan import RowWork, WorkResult
from quire.core.pooling import Pool
from quire.nn.pooler import Float32, Pooled, Pooler
from quire.worker.outlets.interface import TaskBatch, Unread
from quire.worker.rows import RowTable
from quire.worker.staging import Staging


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
        ended: list[tuple[int, Pool, Float32]] = []
        begun: dict[int, Pooled] = {}
        for number, (place, task, chunk) in enumerate(
            zip(batch.places, batch.tasks, chunks, strict=True)
        ):
            assert isinstance(task, Pool)
            work = batch.hidden.work[place]
            pooled = begun[work.row] = self._taken(work, task, chunk)
            if work.start + work.num_tokens >= int(self._rows.num_prompt_tokens[work.row]):
                ended.append((number, task, self._vectors(task, pooled)))
                del begun[work.row]
        if ended:
            outputs = self._pooler.outputs(np.concatenate([vectors for _, _, vectors in ended]))
            ends = np.cumsum([len(vectors) for _, _, vectors in ended])[:-1]
            for (number, task, _), rows in zip(ended, np.split(outputs, ends), strict=True):
                results[number] = WorkResult(pooled=self._encoded(task, rows))
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
        pooled = Pooled() if known is None else replace(known, rows=known.rows.copy())
        chunk = chunk[max(0, task.num_skipped - work.start) :] if task.is_whole else chunk
        if task.is_per_token:
            pooled.rows.append(chunk)
        elif len(chunk):
            self._pooler.take(pooled, chunk)
        return pooled

    def _vectors(self, task: Pool, pooled: Pooled) -> Float32:
        """Return a prompt's pooled states [vectors, H]."""
        if task.is_per_token:
            return np.concatenate(pooled.rows)
        return self._pooler.vector(pooled)[None]

    def _encoded(self, task: Pool, rows: Float32) -> bytes:
        finished = [
            self._pooler.finished(row, task.dimensions, is_activated=task.is_activated)
            for row in rows
        ]
        return np.stack(finished).astype("<f4").tobytes()
