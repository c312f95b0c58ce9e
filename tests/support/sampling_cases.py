"""Logits, rows, filters, keys and penalties for the tests of sampling kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.sampling import Filters, Keys, Penalties, ScaledRows


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    coarse = torch.rand(num_rows, 1, generator=generator) < 0.5
    logits = torch.where(coarse, (logits * 2).round() / 2, logits)  # ties
    banned = torch.rand(num_rows, vocab_size, generator=generator) < 0.1
    banned[:, 0] = False
    return logits.masked_fill(banned, -math.inf)


def make_rows(logits: Tensor, seed: int = 0) -> ScaledRows:
    """Every row once, in a random order, and the first once more."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.cat([torch.randperm(logits.shape[0], generator=generator), torch.tensor([0])])
    scale = (torch.rand(len(row), generator=generator) * 3 + 0.05).float()
    return ScaledRows(row, logits.max(dim=1).values[row], scale)


def make_keys(count: int, seed: int = 0) -> Keys:
    generator = torch.Generator().manual_seed(seed)
    return Keys(
        torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        torch.randint(0, 2**40, (count,), generator=generator),
    )


def make_filters(count: int, vocab_size: int, seed: int = 0) -> Filters:
    generator = torch.Generator().manual_seed(seed)

    def pick(options: list[float]) -> Tensor:
        return torch.tensor(options)[torch.randint(len(options), (count,), generator=generator)]

    return Filters(
        top_k=pick([1, 2, 7, 50, 900, vocab_size]).long().clamp(max=vocab_size),
        top_p=pick([1.0, 0.999999, 0.9, 0.5, 1e-6]).double(),
        floor=pick([-math.inf, -30.0, math.log(0.05), 0.0]),
    )


def make_penalties(seed: int = 4) -> Penalties:
    """Five rows out of six, with prompts and outputs of many lengths,
    some ids outside a vocabulary of 300."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([0, 5, 40, 0, 3, 200, 90, 0, 0, 700])  # prompt, output, prompt, ...
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Penalties(
        row=torch.tensor([5, 0, 3, 1, 2]),
        token_ids=torch.randint(
            -3, 310, (int(lengths.sum()),), generator=generator, dtype=torch.int32
        ),
        start=ends[::2].contiguous(),
        output_start=ends[1::2].contiguous(),
        repetition=torch.tensor([1.0, 1.3, 0.7, 1.1, 2.0]),
        frequency=torch.tensor([0.1, 0.0, -0.3, 1.7, 0.01]),
        presence=torch.tensor([0.0, 0.3, -0.7, 2.0, 0.05]),
    )
