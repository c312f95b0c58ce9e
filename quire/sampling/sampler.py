"""From rows of logits to sampled tokens and their log-probabilities.

Owns the path of a row: check, edit a copy where the request edits, then take the best token or draw
one, then report. It works on whole batches, groups rows by what they use, and calls a kernel once
for each group; a batch of plain greedy rows is one argmax. A row's result never depends on other
rows, to the bit, and a row that fails (logits that are not finite, a mask that leaves nothing, a
processor that raises) fails alone, with `WorkResult.error`.

Between calls it keeps the id lists of the requests it has seen, where rows stand in their grammars,
and room for copies: no state that a result could depend on. It never sees a request or a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.common.seeds import derive_seed
from quire.core.plan import NO_TOKEN_LEFT, NOT_FINITE, RowSampling, TokenLogprobs, WorkResult
from quire.grammar.rows import RowMatchers
from quire.kernels.sampling import Filters, Keys, SamplingKernels, ScaledRows
from quire.sampling.edits import RowEditor, is_edited
from quire.sampling.logprobs import Query, describe, num_alternatives, prompt_logprobs
from quire.sampling.plain import has_filters, min_p_threshold, scale_of, signed
from quire.sampling.processors import ProcessorTable
from quire.sampling.rows import SampledRow
from quire.sampling.tensors import floats, integers, scaled_rows, thresholds_of

_BAD_EDIT = "the logits became NaN or +inf under this request's logit_bias, processors or penalties"


@dataclass(slots=True)
class _Surface:
    """Logits that rows are sampled from: the model's own, or the edited copies."""

    logits: Tensor
    """float32 [m, V]"""
    best_ids: list[int]
    max_logits: list[float]
    members: list[tuple[int, int]] = field(default_factory=list)
    """(index in the batch, row of `logits`) of the rows that are sampled from here."""


@dataclass(slots=True)
class _RowOutcome:
    """What is known so far of one row of the batch."""

    error: str | None = None
    token_ids: tuple[int, ...] = ()
    threshold: tuple[float, int] | None = None
    reports: list[TokenLogprobs] = field(default_factory=list)


class Sampler:
    """Samples batches of rows with one back end's kernels."""

    def __init__(
        self,
        kernels: SamplingKernels,
        processors: ProcessorTable | None = None,
        matchers: RowMatchers | None = None,
    ) -> None:
        self.kernels = kernels
        self.processors = ProcessorTable() if processors is None else processors
        self._editor = RowEditor(
            kernels, self.processors, RowMatchers() if matchers is None else matchers
        )
        self._held: Tensor | None = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[WorkResult]:
        """Sample: one result for each row; `logits` (float32 [R, V], never written) holds one row
        for each of `rows`.

        For beam search (`num_candidates`) the one report's alternatives are the best tokens that
        can be sampled, with their log-probabilities after edits and temperature; top-k, top-p and
        min-p do not apply.
        """
        assert logits.ndim == 2 and logits.shape[0] == len(rows) and logits.dtype is torch.float32
        outcomes = [_RowOutcome() for _ in rows]
        if not rows:
            return []
        logits = logits.contiguous()
        plain = self._surface(logits)
        for i, max_logit in enumerate(plain.max_logits):
            if not math.isfinite(max_logit):
                outcomes[i].error = NOT_FINITE
        edited = self._edited_surface(plain, rows, outcomes)
        for surface in filter(None, (plain, edited)):
            self._choose(surface, rows, outcomes)
            self._report(surface, plain, rows, outcomes)
        return [_result(outcome) for outcome in outcomes]

    def num_possible(self, row: SampledRow, token_ids: Sequence[int]) -> int:
        """How many of some tokens, one after the other, may be sampled for a row with a grammar."""
        return self._editor.num_possible(row, token_ids)

    def prompt_logprobs(
        self, logits: Tensor, target_ids: Sequence[int], sampling: RowSampling
    ) -> tuple[TokenLogprobs, ...]:
        """`logprobs.prompt_logprobs` with this sampler's kernels."""
        return prompt_logprobs(self.kernels, logits.contiguous(), target_ids, sampling)

    def _surface(self, logits: Tensor) -> _Surface:
        best_ids, max_logits = self.kernels.argmax(logits)
        return _Surface(logits, best_ids.tolist(), max_logits.tolist())

    def _edited_surface(
        self, plain: _Surface, rows: Sequence[SampledRow], outcomes: list[_RowOutcome]
    ) -> _Surface | None:
        """Edit copies of the rows that need it, and settle which rows are sampled from where."""
        sound = [i for i, outcome in enumerate(outcomes) if outcome.error is None]
        indices = [i for i in sound if is_edited(rows[i])]
        chosen = set(indices)
        plain.members = [(i, i) for i in sound if i not in chosen]
        if not indices:
            return None
        logits = self._copies(plain.logits, indices)
        errors = self._editor.edit(logits, [rows[i] for i in indices])
        edited = self._surface(logits)
        for j, i in enumerate(indices):
            if not math.isfinite(edited.max_logits[j]):
                errors.setdefault(
                    j, NO_TOKEN_LEFT if edited.max_logits[j] == -math.inf else _BAD_EDIT
                )
            if j in errors:
                outcomes[i].error = errors[j]
            else:
                edited.members.append((i, j))
        return edited

    def _copies(self, logits: Tensor, indices: list[int]) -> Tensor:
        """Return copies of some rows, in memory that is kept for the next call:
        fresh pages cost more than the copy itself."""
        held = self._held
        if (
            held is None
            or held.device != logits.device
            or held.shape[1:] != logits.shape[1:]
            or len(held) < len(indices)
        ):
            held = self._held = torch.empty((len(indices), logits.shape[1]), device=logits.device)
        index = integers(indices, logits.device)
        return torch.index_select(logits, 0, index, out=held[: len(indices)])

    def _choose(
        self, surface: _Surface, rows: Sequence[SampledRow], outcomes: list[_RowOutcome]
    ) -> None:
        """Fill in `token_ids`, and `threshold` where filters apply."""
        free, filtered = [], []
        for i, j in surface.members:
            row = rows[i]
            if row.num_candidates or not row.num_samples:
                continue
            if row.sampling.temperature == 0.0:
                outcomes[i].token_ids = (surface.best_ids[j],) * row.num_samples
            elif has_filters(row.sampling, surface.logits.shape[1]):
                filtered.append((i, j))
            else:
                free.append((i, j))
        if free:
            self._draw(surface, free, rows, outcomes)
        if filtered:
            self._threshold(surface, filtered, rows, outcomes)
            self._draw(surface, filtered, rows, outcomes)

    def _threshold(
        self,
        surface: _Surface,
        members: list[tuple[int, int]],
        rows: Sequence[SampledRow],
        outcomes: list[_RowOutcome],
    ) -> None:
        samplings = [rows[i].sampling for i, _ in members]
        device, vocab_size = surface.logits.device, surface.logits.shape[1]
        filters = Filters(
            top_k=integers([min(s.top_k or vocab_size, vocab_size) for s in samplings], device),
            top_p=torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device),
            floor=floats([min_p_threshold(s) for s in samplings], device),
        )
        thresholds = self.kernels.thresholds(
            surface.logits, _scaled_rows(surface, members, rows), filters
        )
        for (i, _), value, token_id in zip(
            members, thresholds.value.tolist(), thresholds.token_id.tolist(), strict=True
        ):
            outcomes[i].threshold = (value, token_id)

    def _draw(
        self,
        surface: _Surface,
        members: list[tuple[int, int]],
        rows: Sequence[SampledRow],
        outcomes: list[_RowOutcome],
    ) -> None:
        """Draw `num_samples` tokens for each member; all of them have a threshold, or none."""
        draws = [(i, j, n) for i, j in members for n in range(rows[i].num_samples)]
        device = surface.logits.device
        keys = Keys(
            seed=integers(
                [signed(derive_seed(rows[i].sampling.seed, n)) for i, _, n in draws], device
            ),
            position=integers([rows[i].position for i, _, _ in draws], device),
        )
        found = [threshold for i, _, _ in draws if (threshold := outcomes[i].threshold) is not None]
        thresholds = thresholds_of(found, device) if found else None
        scaled = _scaled_rows(surface, [(i, j) for i, j, _ in draws], rows)
        token_ids = self.kernels.draw(surface.logits, scaled, thresholds, keys).tolist()
        for (i, _, _), token_id in zip(draws, token_ids, strict=True):
            outcomes[i].token_ids += (token_id,)

    def _report(
        self,
        surface: _Surface,
        plain: _Surface,
        rows: Sequence[SampledRow],
        outcomes: list[_RowOutcome],
    ) -> None:
        """Fill in `reports` for the members that want log-probabilities or candidates."""
        wanted: dict[bool, list[tuple[int, Query]]] = {False: [], True: []}
        for i, j in surface.members:
            row = rows[i]
            if row.num_candidates:
                wanted[False].append((i, _candidates_query(surface, j, row)))
            elif row.sampling.num_logprobs is not None:
                is_raw = row.sampling.logprobs_mode.startswith("raw")
                where = (plain, i) if is_raw else (surface, j)
                threshold = None if is_raw else outcomes[i].threshold
                wanted[is_raw] += [
                    (i, _query(where, row, token_id, threshold))
                    for token_id in outcomes[i].token_ids
                ]
        for is_raw, queries in wanted.items():
            logits = plain.logits if is_raw else surface.logits
            reports = describe(self.kernels, logits, [query for _, query in queries])
            for (i, _), report in zip(queries, reports, strict=True):
                outcomes[i].reports.append(
                    report if not rows[i].num_candidates else _possible(report)
                )


def _scaled_rows(
    surface: _Surface, members: list[tuple[int, int]], rows: Sequence[SampledRow]
) -> ScaledRows:
    return scaled_rows(
        [(j, surface.max_logits[j], scale_of(rows[i].sampling)) for i, j in members],
        surface.logits.device,
    )


def _query(
    where: tuple[_Surface, int], row: SampledRow, token_id: int, threshold: tuple[float, int] | None
) -> Query:
    surface, j = where
    sampling = row.sampling
    return Query(
        row=j,
        max_logit=surface.max_logits[j],
        token_id=token_id,
        num_top=num_alternatives(sampling.num_logprobs or 0, surface.logits.shape[1]),
        scale=1.0 if sampling.logprobs_mode.startswith("raw") else scale_of(sampling),
        threshold=threshold,
        extra_ids=sampling.logprob_token_ids,
        is_logits=sampling.logprobs_mode.endswith("logits"),
    )


def _candidates_query(surface: _Surface, j: int, row: SampledRow) -> Query:
    return Query(
        row=j,
        max_logit=surface.max_logits[j],
        token_id=surface.best_ids[j],
        num_top=num_alternatives(row.num_candidates, surface.logits.shape[1]),
        scale=scale_of(row.sampling),
    )


def _possible(report: TokenLogprobs) -> TokenLogprobs:
    """Return a report without the alternatives that cannot be sampled; they are the last ones."""
    count = sum(logprob > -math.inf for logprob in report.top_logprobs)
    return report._replace(top_ids=report.top_ids[:count], top_logprobs=report.top_logprobs[:count])


def _result(outcome: _RowOutcome) -> WorkResult:
    if outcome.error is not None:
        return WorkResult(error=outcome.error)
    return WorkResult(token_ids=outcome.token_ids, logprobs=tuple(outcome.reports))
