"""The worker: carries out a plan on a model. Rows, inputs, forward pass, logits where they are needed, sampling.

Owns its rows and its KV memory. It knows plans, rows and tensors; requests, texts and scheduling are none of its business.
A step is *launched*, and its outcome asked for later. Where nothing else is said the outcome is there by then. A device that
computes beside the host is asked for as little as can be (`read_late`): the next step may be launched before the tokens of
this one have been read, if all that this one samples is plain; what needs tokens or logits on the host (edits of the logits,
log-probabilities, beams, forks) waits for its own step, as it would without.

What goes wrong for one row alone (numbers that are not finite, a failing processor, even a kernel that raises on it) becomes
that row's error; the others' results are what they would have been without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.common.failures import log_failure
from quire.config.limits import MAX_SCORED_ROWS
from quire.core.plan import NOT_FINITE, RowSampling, RowWork, StepPlan, StepResult, TokenLogprobs, WorkResult
from quire.errors import RequestError
from quire.nn.context import StepContext
from quire.nn.decoder import DecoderModel
from quire.sampling import SampledRow, Sampler
from quire.sampling.known import drawn_results, greedy_results
from quire.sampling.plain import choose_plain, draws_of, has_filters, is_plain
from quire.worker.batch import StepArrays, StepInputs, gather, move
from quire.worker.companions import Companion, Companions
from quire.worker.graphs import GraphBackend, GraphSettings, ScratchBlock, StepGraphs
from quire.worker.last_tokens import Arrival, LastTokens, Readback
from quire.worker.memory import KVMemory
from quire.worker.rows import RowTable
from quire.worker.staging import Staging

logger = logging.getLogger(__name__)

Outcome = Callable[[], list[WorkResult]]
"""The results of some work, in its order; waits for the device where it has to."""

_LOST = "the step before this one failed on this sequence"


class Worker:
    """One model, its KV memory, and the rows of the sequences that run on it."""

    def __init__(
        self, model: DecoderModel, memory: KVMemory, rows: RowTable, sampler: Sampler, companions: Iterable[Companion] = ()
    ) -> None:
        self.model = model
        self.memory = memory
        self.rows = rows
        self.sampler = sampler
        self.companions = Companions(companions)
        self._stage = Staging(model.kernels.device)
        self.graphs: StepGraphs | None = None
        self.last_tokens: LastTokens | None = None
        self._has_failed = False
        """Whether a row is known to have failed in the last step: it did not sample the token that the next one counts on."""
        self._plain: list[tuple[RowSampling | None, bool]] = [(None, False)] * len(rows.sampling)

    def read_late(self, read: Readback) -> None:
        """Keep sampled tokens on the device and read them with `read`. Before the first step and the first graph."""
        self.last_tokens = LastTokens(len(self.rows.sampling), self.model.kernels.device, read)

    def use_graphs(self, backend: GraphBackend, settings: GraphSettings) -> None:
        """Record small steps and replay them; the last block of the memory must be in no pool."""
        scratch = ScratchBlock(self.memory.num_blocks - 1, self.rows.block_size)
        self.graphs = StepGraphs(self._forward, self._stage, backend, settings, scratch)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Make use of a moment in which nothing is to be computed; whether there may be more to do."""
        return self.graphs is not None and self.graphs.record_next()

    def _forward(self, inputs: StepInputs) -> Tensor:
        context = StepContext(inputs.batch, self.memory.caches, inputs.num_wanted)
        token_ids = inputs.token_ids if self.last_tokens is None else self.last_tokens.fill_in(inputs.token_ids)
        return self.model.forward(token_ids, inputs.batch.positions, context)

    def execute(self, plan: StepPlan) -> StepResult:
        """`launch`, and wait."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Apply a plan's changes, begin to compute its work; see `quire.executor.interface`."""
        started = time.perf_counter()
        self.companions.begin(plan)
        self.rows.apply(plan)
        self.memory.copy_blocks(plan.copies, self.model.kernels, self._stage)
        had_failed, self._has_failed = self._has_failed, False
        outcome = self._launch_known(plan.work) if had_failed else self._launch_contained(plan.work)
        news = self.companions.take_news(plan)

        def result() -> StepResult:
            results = tuple(outcome())
            assert len(results) == len(plan.work)
            return StepResult(plan.step_id, results, time.perf_counter() - started, news)

        return result

    def _launch_known(self, work: Sequence[RowWork]) -> Outcome:
        """Compute what can be: not beyond the tokens that a row has."""
        known = [item.start + item.num_tokens <= self.rows.num_tokens[item.row] for item in work]
        outcome = self._launch_contained([item for item, is_known in zip(work, known, strict=True) if is_known])
        self._has_failed |= not all(known)

        def results() -> list[WorkResult]:
            found = iter(outcome())
            return [next(found) if is_known else WorkResult(error=_LOST) for is_known in known]

        return results

    def _launch_contained(self, work: Sequence[RowWork]) -> Outcome:
        """Compute everything together; if that raises, each row alone, so that only the culprit is blamed.

        Computing a row twice is harmless: the same numbers go to the same slots.
        """
        if not work:
            return list
        try:
            return self._launch(work)
        except Exception as error:
            log_failure(logger, f"a step of {len(work)} rows failed; computing each row alone", error)
        outcomes = []
        for item in work:
            try:
                outcomes.append(self._launch([item]))
            except Exception as error:
                self._has_failed = True
                failed = WorkResult(error=f"the model failed on this sequence: {type(error).__name__}")
                outcomes.append(partial(list, (failed,)))
        return lambda: [result for outcome in outcomes for result in outcome()]

    def _launch(self, work: Sequence[RowWork]) -> Outcome:
        """Compute, and give each row the token that it sampled, once nothing can raise any more."""
        if self.last_tokens is not None and all(map(self._can_be_read_late, work)):
            return self._launch_late(work, self.last_tokens)
        results = self._compute(work)
        for item, result in zip(work, results, strict=True):
            if result.token_ids:
                self.rows.append_token(item.row, result.token_ids[0])
            self._has_failed |= result.error is not None
        return lambda: results

    def _can_be_read_late(self, work: RowWork) -> bool:
        """Whether nobody but the next step, on the device, needs the row's token or logits."""
        is_alone = work.num_samples <= 1 and not work.num_candidates and work.prompt_logprobs_from < 0
        return is_alone and (work.num_samples == 0 or self._is_plain(work))

    def _launch_late(self, work: Sequence[RowWork], tokens: LastTokens) -> Outcome:
        """As `_compute`, reading nothing back. A row that fails is heard of later; until then its tokens are any."""
        arrays, hidden = self._hidden(work)
        query_start = arrays.query_start.tolist()
        sampled = [place for place, item in enumerate(work) if item.num_samples]
        on_device = [self.model.kernels.finite_rows(hidden)]
        if not sampled:
            return partial(_late_results, tokens.read(on_device), query_start, sampled)
        places = np.array([query_start[place + 1] - 1 for place in sampled], np.int64)
        ends, rows = self._stage((places, np.array([work[place].row for place in sampled], np.int64)))
        last = hidden if len(sampled) == len(hidden) else hidden.index_select(0, ends)
        token_ids, peaks = self._choose_plain(last, [work[place] for place in sampled])
        arrival = tokens.read([*on_device, token_ids, peaks])
        tokens.put(rows, token_ids)
        for place in sampled:
            self.rows.append_unread(work[place].row)
        return partial(_late_results, arrival, query_start, sampled)

    def _choose_plain(self, hidden: Tensor, work: Sequence[RowWork]) -> tuple[Tensor, Tensor]:
        """Ids and largest logits, on the device; see `choose_plain`."""
        if all(self._is_plain_greedy(item) for item in work):
            best = self.model.best_tokens(hidden)
            if best is not None:
                return best
        rows = [self._sampled_row(item) for item in work]
        return choose_plain(self.sampler.kernels, self.model.logits(hidden), rows, self._stage)

    def _hidden(self, work: Sequence[RowWork]) -> tuple[StepArrays, Tensor]:
        """The forward pass: its inputs, and hidden states [T, H] that are valid until the next one is launched."""
        arrays = gather(self.rows, work, shared_unit=self.model.kernels.shared_prefix_unit)
        hidden = None if self.graphs is None else self.graphs.forward(arrays)
        if hidden is None:
            hidden = self._forward(move(arrays, self.rows.block_size, self._stage))
        return arrays, hidden

    def _compute(self, work: Sequence[RowWork]) -> list[WorkResult]:
        arrays, hidden = self._hidden(work)
        query_start = arrays.query_start.tolist()
        kernels = self.model.kernels
        broken = frozenset() if kernels.is_finite(hidden) else _places_not_finite(kernels.finite_rows(hidden), query_start)
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
        rows = [self._sampled_row(item) for item in work]
        if all(map(self._is_free, work)):
            drawn = self.model.drawn_tokens(hidden, draws_of(rows))
            if drawn is not None:
                return drawn_results(drawn, rows)
        return self.sampler.sample(self.model.logits(hidden), rows)

    def _is_plain_greedy(self, work: RowWork) -> bool:
        return self._is_plain(work) and self.rows.sampling[work.row].temperature == 0.0 and not work.num_candidates

    def _is_free(self, work: RowWork) -> bool:
        """Whether its tokens are drawn from all of the model's own logits, or are the best of them."""
        filters = has_filters(self.rows.sampling[work.row], self.model.head.num_outputs)
        return not filters and self._is_plain(work) and not work.num_candidates

    def _is_plain(self, work: RowWork) -> bool:
        """Remembered for as long as the row keeps its sampling parameters, which is one object for the row's life."""
        sampling = self.rows.sampling[work.row]
        known, found = self._plain[work.row]
        if known is not sampling:
            found = is_plain(sampling)
            self._plain[work.row] = (sampling, found)
        return found

    def _sampled_row(self, work: RowWork) -> SampledRow:
        tokens, num_prompt = self.rows.tokens(work.row), int(self.rows.num_prompt_tokens[work.row])
        return SampledRow(
            sampling=self.rows.sampling[work.row],
            position=work.start + work.num_tokens,
            prompt_token_ids=tokens[:num_prompt],
            output_token_ids=tokens[num_prompt:],
            num_samples=work.num_samples,
            num_candidates=work.num_candidates,
            row=work.row,
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


def _late_results(arrival: Arrival, query_start: Sequence[int], sampled: Sequence[int]) -> list[WorkResult]:
    """What came of a step whose tokens were read late: those of each place that sampled, and who failed."""
    is_finite, *chosen = arrival()
    is_sound = np.logical_and.reduceat(is_finite.numpy(), query_start[:-1]).tolist()
    results = [WorkResult(error=None if each else NOT_FINITE) for each in is_sound]
    if chosen:
        token_ids, peaks = chosen
        for place, result in zip(sampled, greedy_results((token_ids, peaks), [1] * len(sampled)), strict=True):
            results[place] = result if is_sound[place] else results[place]
    return results


def _places_not_finite(is_sound: Tensor, query_start: Sequence[int]) -> frozenset[int]:
    """Places in the work of which some token's hidden state is NaN or infinite."""
    return frozenset(np.flatnonzero(~np.logical_and.reduceat(is_sound.cpu().numpy(), query_start[:-1])).tolist())
