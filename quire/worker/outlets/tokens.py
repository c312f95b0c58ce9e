"""The outlet for tokens: samples, and the candidates of a beam search.

Owns the choice of the shortest way from hidden states to tokens. All ways give the same tokens and
the same errors:

    greedy     no row is edited or drawn from: the head and the largest logit in one kernel
    unfiltered drawn from all of the model's own logits: the head and the draw in one kernel
    sampler    everything else, with logits in memory (`quire.sampling.Sampler`)
    unread     as the sampler does for plain rows, but nothing is read back from the device
    (`quire.sampling.plain`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from quire.core.plan import (
    NOT_FINITE,
    Candidates,
    RowSampling,
    RowWork,
    Sample,
    Task,
    Verify,
    WorkResult,
)
from quire.nn.decoder import DecoderModel
from quire.sampling import SampledRow, Sampler
from quire.sampling.plain import choose_plain, draws_of, has_filters, is_plain
from quire.worker.outlets.interface import TaskBatch, Unread
from quire.worker.outlets.places import last_places
from quire.worker.rows import RowTable
from quire.worker.staging import Staging


class TokenOutlet:
    """Implements `Outlet` with one model's head and a sampler."""

    tasks = (Sample, Verify, Candidates)

    def __init__(self, model: DecoderModel, rows: RowTable, sampler: Sampler) -> None:
        self.model = model
        self.sampler = sampler
        self._rows = rows
        self._stage = Staging(model.kernels.device)
        self._plain: list[tuple[RowSampling | None, bool]] = [(None, False)] * len(rows.sampling)

    def launch(self, batch: TaskBatch) -> list[WorkResult]:
        if any(type(task) is Verify for task in batch.tasks):
            return self._launch_runs(batch)
        return self._choose(batch.last_states(self._stage), batch.work, batch.tasks)

    def launch_unread(self, batch: TaskBatch) -> Unread | None:
        work, tasks = batch.work, batch.tasks
        counts = self._plain_counts(work, tasks)
        if counts is None or max(counts) > 1:
            return None
        hidden, places = batch.last_states(self._stage), last_places(self.model, work)
        are_greedy = _are_greedy(self._samplings(work))
        chosen = self.model.best_tokens(hidden, places) if are_greedy else None
        if chosen is None:
            rows = self._sampled_rows(work, tasks)
            logits = self.model.logits(hidden, places)
            chosen = choose_plain(self.sampler.kernels, logits, rows, self._stage)
        return Unread(chosen, _one_each)

    def _launch_runs(self, batch: TaskBatch) -> list[WorkResult]:
        """Where rows verify tokens: every position is sampled as if its step ended there."""
        ends: list[int] = []
        work: list[RowWork] = []
        tasks: list[Task] = []
        sizes: list[int] = []
        for place, item, task in zip(batch.places, batch.work, batch.tasks, strict=True):
            num_ahead = item.num_ahead if isinstance(task, Verify) else 0
            end = batch.hidden.query_start[place + 1] - num_ahead
            size = 1 + (self._num_possible(item, task) if isinstance(task, Verify) else 0)
            known = item.num_tokens - num_ahead
            ends += range(end - 1, end - 1 + size)
            work += [item._replace(num_tokens=known + each) for each in range(size)]
            tasks += [task] if not isinstance(task, Verify) else [Sample()] * size
            sizes.append(size)
        (index,) = self._stage((np.array(ends, np.int64),))
        found = iter(self._choose(batch.hidden.states.index_select(0, index), work, tasks))
        return [
            _run(task.token_ids, list(islice(found, size)))
            if isinstance(task, Verify)
            else next(found)
            for task, size in zip(batch.tasks, sizes, strict=True)
        ]

    def _num_possible(self, work: RowWork, task: Verify) -> int:
        """Of the tokens to be verified, those that the row's grammar has nothing against."""
        if self._rows.sampling[work.row].grammar is None:
            return len(task.token_ids)
        known = work._replace(num_tokens=work.num_tokens - len(task.token_ids))
        return self.sampler.num_possible(self._sampled_row(known, task), task.token_ids)

    def _choose(
        self, hidden: Tensor, work: Sequence[RowWork], tasks: Sequence[Task]
    ) -> list[WorkResult]:
        """Choose from each of the hidden states [n, H]."""
        places = last_places(self.model, work)
        counts, samplings = self._plain_counts(work, tasks), self._samplings(work)
        if counts is not None and _are_greedy(samplings):
            best = self.model.best_tokens(hidden, places)
            if best is not None:
                return greedy_results(best, counts)
        rows = self._sampled_rows(work, tasks)
        if counts is not None and not any(
            has_filters(each, self.model.head.num_outputs) for each in samplings
        ):
            drawn = self.model.drawn_tokens(hidden, draws_of(rows), places)
            if drawn is not None:
                return drawn_results(drawn, rows)
        return self.sampler.sample(self.model.logits(hidden, places), rows)

    def _samplings(self, work: Sequence[RowWork]) -> list[RowSampling]:
        return [self._rows.sampling[item.row] for item in work]

    def _plain_counts(self, work: Sequence[RowWork], tasks: Sequence[Task]) -> list[int] | None:
        """Return tokens to sample for each task; None where some row is edited, reported on,
        or searches with beams."""
        if not all(self._is_plain(item.row) for item in work):
            return None
        counts = [task.count for task in tasks if isinstance(task, Sample)]
        return counts if len(counts) == len(tasks) else None

    def _is_plain(self, row: int) -> bool:
        """Remembered for as long as the row keeps its sampling parameters,
        which is one object for the row's life."""
        sampling = self._rows.sampling[row]
        known, found = self._plain[row]
        if known is not sampling:
            found = is_plain(sampling)
            self._plain[row] = (sampling, found)
        return found

    def _sampled_rows(self, work: Sequence[RowWork], tasks: Sequence[Task]) -> list[SampledRow]:
        return [self._sampled_row(item, task) for item, task in zip(work, tasks, strict=True)]

    def _sampled_row(self, work: RowWork, task: Task) -> SampledRow:
        position, num_prompt = (
            work.start + work.num_tokens,
            int(self._rows.num_prompt_tokens[work.row]),
        )
        tokens = self._rows.token_ids[work.row, :position]
        return SampledRow(
            sampling=self._rows.sampling[work.row],
            position=position,
            prompt_token_ids=tokens[:num_prompt],
            output_token_ids=tokens[num_prompt:],
            num_samples=task.count if isinstance(task, Sample) else 0,
            num_candidates=task.count if isinstance(task, Candidates) else 0,
            row=work.row,
        )


def greedy_results(best: tuple[Tensor, Tensor], nums_samples: Sequence[int]) -> list[WorkResult]:
    """Return what `Sampler.sample` gives for plain greedy rows: their tokens int64 [R], and their
    largest logits [R]."""
    token_ids, max_logits = best
    return [
        WorkResult((token_id,) * num_samples)
        if math.isfinite(max_logit)
        else WorkResult(error=NOT_FINITE)
        for token_id, max_logit, num_samples in zip(
            token_ids.tolist(), max_logits.tolist(), nums_samples, strict=True
        )
    ]


def drawn_results(
    found: tuple[Tensor, Tensor, Tensor], rows: Sequence[SampledRow]
) -> list[WorkResult]:
    """Return the same where some rows are drawn from: those tokens, int64 [n],
    are in the order of `quire.sampling.plain.draws_of`."""
    best_ids, max_logits, drawn = (each.tolist() for each in found)
    tokens, results = iter(drawn), []
    for row, best_id, max_logit in zip(rows, best_ids, max_logits, strict=True):
        count = row.num_samples
        chosen = (
            (best_id,) * count if row.sampling.temperature == 0.0 else tuple(islice(tokens, count))
        )
        results.append(
            WorkResult(chosen) if math.isfinite(max_logit) else WorkResult(error=NOT_FINITE)
        )
    return results


def _run(token_ids: Sequence[int], found: Sequence[WorkResult]) -> WorkResult:
    """What comes of the tokens that were sampled after each of `token_ids`: they count up to the
    first that is another. An error counts where it is met first; else when it is met again."""
    run: list[WorkResult] = []
    for place, one in enumerate(found):
        if one.error is not None:
            if not run:
                return one
            break
        run.append(one)
        if place == len(token_ids) or one.token_ids[0] != token_ids[place]:
            break
    return WorkResult(
        tuple(one.token_ids[0] for one in run),
        tuple(record for one in run for record in one.logprobs),
        num_rejected=len(token_ids) + 1 - len(run),
    )


def _are_greedy(samplings: Sequence[RowSampling]) -> bool:
    return all(each.temperature == 0.0 for each in samplings)


def _one_each(chosen: Sequence[Tensor]) -> list[WorkResult]:
    token_ids, max_logits = chosen
    return greedy_results((token_ids, max_logits), [1] * len(token_ids))
