"""The outlet for prompts whose tokens are scored:
the log-probability of each by the logits of the position before it."""

from __future__ import annotations

from quire.config.limits import MAX_SCORED_ROWS
from quire.core.plan import ScorePrompt, TokenLogprobs, WorkResult
from quire.errors import RequestError
from quire.nn.decoder import DecoderModel
from quire.sampling import Sampler
from quire.worker.outlets.interface import TaskBatch, Unread
from quire.worker.outlets.places import places_of
from quire.worker.rows import RowTable


class PromptScoreOutlet:
    """Implements `Outlet`. Logits of at most `MAX_SCORED_ROWS`
    positions are in memory at a time."""

    tasks = (ScorePrompt,)

    def __init__(self, model: DecoderModel, rows: RowTable, sampler: Sampler) -> None:
        self.model = model
        self.sampler = sampler
        self._rows = rows

    def launch(self, batch: TaskBatch) -> list[WorkResult]:
        results = []
        for place, task in zip(batch.places, batch.tasks, strict=True):
            assert isinstance(task, ScorePrompt)
            try:
                results.append(WorkResult(prompt_logprobs=self._scores(batch, place, task.first)))
            except RequestError as error:
                results.append(WorkResult(error=str(error)))
        return results

    def launch_unread(self, batch: TaskBatch) -> Unread | None:
        return None

    def _scores(self, batch: TaskBatch, place: int, first: int) -> tuple[TokenLogprobs, ...]:
        work = batch.hidden.work[place]
        end = min(work.start + work.num_tokens + 1, int(self._rows.num_prompt_tokens[work.row]))
        tokens, sampling = self._rows.tokens(work.row), self._rows.sampling[work.row]
        # from a token's position to where its logits are made of
        shift = batch.hidden.query_start[place] - work.start - 1
        records: list[TokenLogprobs] = []
        for start in range(first, end, MAX_SCORED_ROWS):
            stop = min(end, start + MAX_SCORED_ROWS)
            states = batch.hidden.states[start + shift : stop + shift]
            before = range(start - 1, stop - 1)
            logits = self.model.logits(states, places_of(self.model, work.row, before))
            records += self.sampler.prompt_logprobs(logits, tokens[start:stop].tolist(), sampling)
        return tuple(records)
