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

from collections.abc import Sequence

from torch import Tensor

from quire.core.plan import Candidates, RowSampling, RowWork, Sample, Task, WorkResult
from quire.nn.decoder import DecoderModel
from quire.sampling import SampledRow, Sampler
from quire.sampling.plain import choose_plain, draws_of, has_filters, is_plain
from quire.sampling.presampled import drawn_results, greedy_results
from quire.worker.outlets.interface import TaskBatch, Unread
from quire.worker.rows import RowTable
from quire.worker.staging import Staging


class TokenOutlet:
    """Implements `Outlet` with one model's head and a sampler."""

    tasks = (Sample, Candidates)

    def __init__(self, model: DecoderModel, rows: RowTable, sampler: Sampler) -> None:
        self.model = model
        self.sampler = sampler
        self._rows = rows
        self._stage = Staging(model.kernels.device)
        self._plain: list[tuple[RowSampling | None, bool]] = [(None, False)] * len(rows.sampling)

    def launch(self, batch: TaskBatch) -> list[WorkResult]:
        hidden, counts, samplings = (
            batch.last_states(self._stage),
            self._plain_counts(batch),
            self._samplings(batch),
        )
        if counts is not None and _are_greedy(samplings):
            best = self.model.best_tokens(hidden)
            if best is not None:
                return greedy_results(best, counts)
        rows = self._sampled_rows(batch)
        if counts is not None and not any(
            has_filters(each, self.model.head.num_outputs) for each in samplings
        ):
            drawn = self.model.drawn_tokens(hidden, draws_of(rows))
            if drawn is not None:
                return drawn_results(drawn, rows)
        return self.sampler.sample(self.model.logits(hidden), rows)

    def launch_unread(self, batch: TaskBatch) -> Unread | None:
        counts = self._plain_counts(batch)
        if counts is None or max(counts) > 1:
            return None
        hidden = batch.last_states(self._stage)
        chosen = self.model.best_tokens(hidden) if _are_greedy(self._samplings(batch)) else None
        if chosen is None:
            chosen = choose_plain(
                self.sampler.kernels,
                self.model.logits(hidden),
                self._sampled_rows(batch),
                self._stage,
            )
        return Unread(chosen, _one_each)

    def _samplings(self, batch: TaskBatch) -> list[RowSampling]:
        return [self._rows.sampling[work.row] for work in batch.work]

    def _plain_counts(self, batch: TaskBatch) -> list[int] | None:
        """Return tokens to sample for each task; None where some row is edited, reported on,
        or searches with beams."""
        if not all(self._is_plain(work.row) for work in batch.work):
            return None
        counts = [task.count for task in batch.tasks if isinstance(task, Sample)]
        return counts if len(counts) == len(batch.tasks) else None

    def _is_plain(self, row: int) -> bool:
        """Remembered for as long as the row keeps its sampling parameters,
        which is one object for the row's life."""
        sampling = self._rows.sampling[row]
        known, found = self._plain[row]
        if known is not sampling:
            found = is_plain(sampling)
            self._plain[row] = (sampling, found)
        return found

    def _sampled_rows(self, batch: TaskBatch) -> list[SampledRow]:
        return [
            self._sampled_row(work, task)
            for work, task in zip(batch.work, batch.tasks, strict=True)
        ]

    def _sampled_row(self, work: RowWork, task: Task) -> SampledRow:
        tokens, num_prompt = (
            self._rows.tokens(work.row),
            int(self._rows.num_prompt_tokens[work.row]),
        )
        return SampledRow(
            sampling=self._rows.sampling[work.row],
            position=work.start + work.num_tokens,
            prompt_token_ids=tokens[:num_prompt],
            output_token_ids=tokens[num_prompt:],
            num_samples=task.count if isinstance(task, Sample) else 0,
            num_candidates=task.count if isinstance(task, Candidates) else 0,
            row=work.row,
        )


def _are_greedy(samplings: Sequence[RowSampling]) -> bool:
    return all(each.temperature == 0.0 for each in samplings)


def _one_each(chosen: Sequence[Tensor]) -> list[WorkResult]:
    token_ids, max_logits = chosen
    return greedy_results((token_ids, max_logits), [1] * len(token_ids))
