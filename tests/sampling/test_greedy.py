"""Plain greedy rows: their results are the sampler's own."""

from __future__ import annotations

import math

import torch

from quire.core.plan import RowSampling
from quire.kernels.reference.sampling import ReferenceSampling
from quire.sampling import SampledRow, Sampler
from quire.sampling.greedy import greedy_results

GREEDY = RowSampling(temperature=0.0)


def test_results_are_those_of_the_sampler() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    logits[1, 3] = logits[1, 30] = 9.0
    logits[2, 5] = math.nan
    logits[3, 5] = math.inf
    logits[4] = -math.inf
    rows = [SampledRow(GREEDY, position=7, num_samples=1 + i % 3) for i in range(6)]
    results = greedy_results(ReferenceSampling().peaks(logits), [row.num_samples for row in rows])
    assert results == Sampler(ReferenceSampling()).sample(logits, rows)
    assert results[1].token_ids == (3, 3) and all(results[i].error for i in (2, 3, 4))
