"""Plain rows without filters: their results are the sampler's own."""

from __future__ import annotations

import math

import torch

from quire.core.plan import RowSampling
from quire.kernels.reference.sampling import ReferenceSampling
from quire.kernels.sampling import ScaledRows
from quire.sampling import SampledRow, Sampler
from quire.sampling.plain import draws_of
from quire.worker.outlets.tokens import drawn_results, greedy_results

GREEDY = RowSampling(temperature=0.0)


def test_results_are_those_of_the_sampler() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    logits[1, 3] = logits[1, 30] = 9.0
    logits[2, 5] = math.nan
    logits[3, 5] = math.inf
    logits[4] = -math.inf
    rows = [SampledRow(GREEDY, position=7, num_samples=1 + i % 3) for i in range(6)]
    results = greedy_results(ReferenceSampling().argmax(logits), [row.num_samples for row in rows])
    assert results == Sampler(ReferenceSampling()).sample(logits, rows)
    assert results[1].token_ids == (3, 3) and all(results[i].error for i in (2, 3, 4))


def test_drawn_results_are_those_of_the_sampler() -> None:
    """Greedy rows among them, several draws of one row,
    and a row that failed between two that did not."""
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(2))
    logits[1, 3] = math.nan
    rows = [
        SampledRow(
            RowSampling(temperature=i % 4 / 2, seed=i), position=7 + i, num_samples=1 + i % 2
        )
        for i in (1, 3, 0, 2)
    ]
    draws, kernels = draws_of(rows), ReferenceSampling()
    best_ids, max_logits = kernels.argmax(logits)
    scaled = ScaledRows(draws.row, max_logits.nan_to_num(0.0)[draws.row], draws.scale)
    drawn = kernels.draw(logits.nan_to_num(0.0), scaled, None, draws.keys)
    results = drawn_results((best_ids, max_logits, drawn), rows)
    assert results == Sampler(kernels).sample(logits, rows)
    assert [len(result.token_ids) for result in results] == [2, 0, 1, 1]
