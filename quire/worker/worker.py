"""The worker: carries out a plan on a model. Rows, inputs, forward pass, logits where they are needed, sampling.

Owns its rows and its KV memory. It knows plans, rows and tensors; requests, texts and scheduling are none of its business.
What goes wrong for one row alone (numbers that are not finite, a failing processor, even a kernel that raises on it) becomes
that row's error; the others' results are what they would have been without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.common.failures import log_failure
from quire.config.limits import MAX_SCORED_ROWS
from quire.core.plan import NOT_FINITE, RowSampling, RowWork, StepPlan, StepResult, TokenLogprobs, WorkResult
from quire.errors import RequestError
from quire.nn.context import StepContext
from quire.nn.decoder import DecoderModel
from quire.sampling import SampledRow, Sampler
from quire.sampling.greedy import greedy_results, is_plain_greedy
from quire.worker.batch import StepInputs, gather, move
from quire.worker.graphs import GraphBackend, GraphSettings, ScratchBlock, StepGraphs
from quire.worker.memory import KVMemory
from quire.worker.rows import RowTable
from quire.worker.staging import Staging

logger = logging.getLogger(__name__)


_LOST = "the step before this one failed on this sequence"

_GRAMMAR_WAIT_S = 0.005
"""A step without work waits so long for a grammar that is being compiled: requests may come, or leave, meanwhile."""


class Worker:
    """One model, its KV memory, and the rows of the sequences that run on it."""

    def __init__(self, model: DecoderModel, memory: KVMemory, rows: RowTable, sampler: Sampler) -> None:
        self.model = model
        self.memory = memory
        self.rows = rows
        self.sampler = sampler
        self._stage = Staging(model.kernels.device)
        self.graphs: StepGraphs | None = None
        self._has_failed = False
        """Whether a row failed in the last step: it did not sample the token that a step planned ahead counts on."""
        self._plain: list[tuple[RowSampling | None, bool]] = [(None, False)] * len(rows.sampling)

    def use_graphs(self, backend: GraphBackend, settings: GraphSettings) -> None:
        """Record small steps and replay them; the last block of the memory must be in no pool."""
        scratch = ScratchBlock(self.memory.num_blocks - 1, self.rows.block_size)
        self.graphs = StepGraphs(self._forward, self._stage, backend, settings, scratch)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Make use of a moment in which nothing is to be computed; whether there may be more to do."""
        return self.graphs is not None and self.graphs.record_next()

    def _forward(self, inputs: StepInputs) -> Tensor:
        context = StepContext(inputs.batch, self.memory.caches)
        return self.model.forward(inputs.token_ids, inputs.batch.positions, context)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply a plan's changes, compute its work; see `quire.executor.interface`."""
        started = time.perf_counter()
        matchers = self.sampler.matchers
        for row in plan.removed_rows:
            matchers.forget(self.rows.sampling[row])
        matchers.grammars.ask(plan.grammars)
        self.rows.apply(plan)
        self.memory.copy_blocks(plan.copies, self.model.kernels)
        results = self._compute_known(plan.work) if self._has_failed else self._compute_contained(plan.work)
        self._has_failed = any(result.error is not None for result in results)
        for work, result in zip(plan.work, results, strict=True):
            if result.token_ids:
                self.rows.append_token(work.row, result.token_ids[0])
        verdicts = matchers.grammars.take_verdicts(0.0 if plan.work else _GRAMMAR_WAIT_S)
        return StepResult(plan.step_id, tuple(results), time.perf_counter() - started, verdicts)

    def _compute_known(self, work: Sequence[RowWork]) -> list[WorkResult]:
        """Compute what can be: not beyond the tokens that a row has."""
        known = [item.start + item.num_tokens <= self.rows.num_tokens[item.row] for item in work]
        results = iter(self._compute_contained([item for item, is_known in zip(work, known, strict=True) if is_known]))
        return [next(results) if is_known else WorkResult(error=_LOST) for is_known in known]

    def _compute_contained(self, work: Sequence[RowWork]) -> list[WorkResult]:
        """Compute everything together; if that raises, each row alone, so that only the culprit is blamed.

        Computing a row twice is harmless: the same numbers go to the same slots.
        """
        if not work:
            return []
        try:
            return self._compute(work)
        except Exception as error:
            log_failure(logger, f"a step of {len(work)} rows failed; computing each row alone", error)
        results = []
        for item in work:
            try:
                results += self._compute([item])
            except Exception as error:
                results.append(WorkResult(error=f"the model failed on this sequence: {type(error).__name__}"))
        return results

    def _compute(self, work: Sequence[RowWork]) -> list[WorkResult]:
        arrays = gather(self.rows, work, shared_unit=self.model.kernels.shared_prefix_unit)
        hidden = None if self.graphs is None else self.graphs.forward(arrays)
        if hidden is None:
            hidden = self._forward(move(arrays, self.rows.block_size, self._stage))
        query_start = arrays.query_start.tolist()
        broken = frozenset() if self.model.kernels.is_finite(hidden) else _rows_not_finite(hidden, query_start)
        results = [WorkResult(error=NOT_FINITE if place in broken else None) for place in range(len(work))]
        sampled = [
            place for place, item in enumerate(work) if (item.num_samples or item.num_candidates) and place not in broken
        ]
        if sampled:
            last = hidden
            if len(sampled) < len(hidden):
                last = hidden[torch.tensor([query_start[place + 1] - 1 for place in sampled], device=hidden.device)]
            for place, outcome in zip(sampled, self._sample(last, [work[place] for place in sampled]), strict=True):
                results[place] = outcome
        for place, item in enumerate(work):
            if item.prompt_logprobs_from >= 0 and results[place].error is None:
                try:
                    scored = self._score_prompt(item, hidden, query_start[place])
                except RequestError as error:
                    results[place] = WorkResult(error=str(error))
                else:
                    results[place] = results[place]._replace(prompt_logprobs=scored)
        return results

    def _sample(self, hidden: Tensor, work: Sequence[RowWork]) -> list[WorkResult]:
        """Sample from the hidden states of the last positions, one row for each work; logits only if somebody needs them."""
        if all(self._is_plain_greedy(item) for item in work):
            best = self.model.best_tokens(hidden)
            if best is not None:
                return greedy_results(best, [item.num_samples for item in work])
        return self.sampler.sample(self.model.logits(hidden), [self._sampled_row(item) for item in work])

    def _is_plain_greedy(self, work: RowWork) -> bool:
        """Remembered for as long as the row keeps its sampling parameters, which is one object for the row's life."""
        sampling = self.rows.sampling[work.row]
        known, is_plain = self._plain[work.row]
        if known is not sampling:
            is_plain = is_plain_greedy(sampling)
            self._plain[work.row] = (sampling, is_plain)
        return is_plain and not work.num_candidates

    def _sampled_row(self, work: RowWork) -> SampledRow:
        tokens, num_prompt = self.rows.tokens(work.row), int(self.rows.num_prompt_tokens[work.row])
        return SampledRow(
            sampling=self.rows.sampling[work.row],
            position=work.start + work.num_tokens,
            prompt_token_ids=tokens[:num_prompt],
            output_token_ids=tokens[num_prompt:],
            num_samples=work.num_samples,
            num_candidates=work.num_candidates,
        )

    def _score_prompt(self, work: RowWork, hidden: Tensor, first_row: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt's tokens from `prompt_logprobs_from` on; position p - 1 scores token p."""
        end = min(work.start + work.num_tokens + 1, int(self.rows.num_prompt_tokens[work.row]))
        tokens, sampling = self.rows.tokens(work.row), self.rows.sampling[work.row]
        records: list[TokenLogprobs] = []
        for start in range(work.prompt_logprobs_from, end, MAX_SCORED_ROWS):
            stop = min(end, start + MAX_SCORED_ROWS)
            shift = first_row - work.start - 1
            logits = self.model.logits(hidden[start + shift : stop + shift])
            records += self.sampler.prompt_logprobs(logits, tokens[start:stop].tolist(), sampling)
        return tuple(records)


def _rows_not_finite(hidden: Tensor, query_start: Sequence[int]) -> frozenset[int]:
    """Places in the work of which some hidden state is NaN or infinite."""
    bad_tokens = (~torch.isfinite(hidden)).any(dim=-1).nonzero().flatten()
    starts = torch.tensor(query_start[1:], device=hidden.device)
    return frozenset(torch.searchsorted(starts, bad_tokens, right=True).tolist())
