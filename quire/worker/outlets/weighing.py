"""The outlet for decisions: the model's logits of some tokens behind a prompt, as they come."""

from __future__ import annotations

import numpy as np

from quire.core.plan import NOT_FINITE, WorkResult
from quire.core.pooling import WeighTokens
from quire.nn.decoder import DecoderModel
from quire.worker.outlets.interface import TaskBatch, Unread
from quire.worker.outlets.places import last_places
from quire.worker.staging import Staging


class WeighingOutlet:
    """Implements `Outlet`. Logits leave it as little-endian float32, in the order of the task."""

    tasks = (WeighTokens,)

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._stage = Staging(model.kernels.device)

    def launch(self, batch: TaskBatch) -> list[WorkResult]:
        places = last_places(self._model, batch.work)
        logits = self._model.logits(batch.last_states(self._stage), places)
        counts: list[int] = []
        ids: list[int] = []
        for task in batch.tasks:
            assert isinstance(task, WeighTokens)
            counts.append(len(task.token_ids))
            ids += task.token_ids
        rows = np.repeat(np.arange(len(counts)), counts)
        index = self._stage((rows.astype(np.int64), np.array(ids, np.int64)))
        chosen = logits[index[0], index[1]].float().cpu().numpy()
        return [_result(each) for each in np.split(chosen, np.cumsum(counts)[:-1])]

    def launch_unread(self, batch: TaskBatch) -> Unread | None:
        return None


def _result(logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> WorkResult:
    if not np.isfinite(logits).all():
        return WorkResult(error=NOT_FINITE)
    return WorkResult(pooled=logits.astype("<f4").tobytes())
