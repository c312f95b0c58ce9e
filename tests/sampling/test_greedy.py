"""Plain greedy rows: which they are, and that their results are the sampler's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quire.core.plan import RowSampling
from quire.kernels.reference.sampling import ReferenceSampling
from quire.sampling import SampledRow, Sampler
from quire.sampling.greedy import greedy_results, is_plain_greedy

GREEDY = RowSampling(temperature=0.0)
NOT_PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"num_logprobs": 0},
    {"presence_penalty": 0.1},
    {"frequency_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"logit_bias": ((1, 2.0),)},
    {"allowed_token_ids": (1,)},
    {"bad_words": ((1, 2),)},
    {"processors": ("p",)},
    {"min_tokens": 3, "stop_token_ids": (4,)},
]


@pytest.mark.parametrize("changes", NOT_PLAIN, ids=lambda changes: next(iter(changes)))
def test_whatever_touches_logits_or_reads_them_is_not_plain(changes: dict[str, Any]) -> None:
    assert not is_plain_greedy(GREEDY._replace(**changes))


def test_filters_and_seeds_mean_nothing_to_a_greedy_row() -> None:
    assert is_plain_greedy(GREEDY)
    assert is_plain_greedy(GREEDY._replace(top_k=5, top_p=0.5, min_p=0.1, seed=7, stop_token_ids=(4,), num_prompt_logprobs=3))


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
