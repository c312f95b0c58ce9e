"""Plain rows: which they are, and that their tokens and errors are the sampler's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quire.core.plan import RowSampling
from quire.kernels import load
from quire.kernels.sampling import SamplingKernels
from quire.sampling import SampledRow, Sampler, select_sampling
from quire.sampling.plain import choose_plain, is_plain
from quire.worker.outlets.tokens import greedy_results

NOT_PLAIN: list[dict[str, Any]] = [
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
    assert not is_plain(RowSampling(**changes))


def test_filters_temperatures_and_seeds_are_plain() -> None:
    assert is_plain(RowSampling(temperature=0.0))
    assert is_plain(
        RowSampling(
            top_k=5, top_p=0.5, min_p=0.1, seed=7, stop_token_ids=(4,), num_prompt_logprobs=3
        )
    )


def plain_rows(count: int) -> list[SampledRow]:
    """Greedy, drawn and filtered in turns, at any position, with seeds of all 64 bits."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.01},
    ]
    return [
        SampledRow(
            RowSampling(seed=(0x9E3779B97F4A7C15 * (i + 1)) % 2**64, **kinds[i % 3]),
            position=3 + 40 * i,
        )
        for i in range(count)
    ]


def odd_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Some rows hold what is not finite: nine of them, three for each kind of row."""
    logits = 3 * torch.randn(
        num_rows, vocab_size, generator=torch.Generator().manual_seed(num_rows)
    )
    logits[3:6, 5], logits[6:9, 5], logits[9:12] = math.nan, math.inf, -math.inf
    return logits


def stage(arrays: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


@pytest.mark.parametrize(
    "kernels",
    [select_sampling(load(name)) for name in ("reference", "cpu")],
    ids=lambda each: each.name,
)
def test_tokens_and_errors_are_those_of_the_sampler(kernels: SamplingKernels) -> None:
    logits, rows = odd_logits(20, 50), plain_rows(20)
    token_ids, max_logits = choose_plain(kernels, logits.clone(), rows, stage)
    assert greedy_results((token_ids, max_logits), [1] * 20) == Sampler(kernels).sample(
        logits, rows
    )
    assert ((token_ids >= 0) & (token_ids < 50)).all(), "the next step looks up whatever was chosen"
    alone = [
        choose_plain(kernels, logits[i : i + 1].clone(), [rows[i]], stage)[0].item()
        for i in range(3)
    ]
    assert alone == token_ids[:3].tolist()
