"""Padded batches of about equally long samples.

Owns how samples become tensors: a batch holds at most a fixed number of tokens, padding included.
Deterministic: pool `index` of a seed is always the same for the same progress, which is what lets a
run go on after a stop.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from .samples import MixedSource, Sample

POOL_SAMPLES = 384
LEN_STEP = 8
IGNORED = -100
NAMED_WEIGHT = 3.0
"""Of the loss at tokens that the request names: they are few, and all that a plot leaves open."""


@dataclass(frozen=True, slots=True)
class Batch:
    """ids and targets, both int64 [batch, len]; a target is the next token,
    or -100 where nothing is to be learnt. weights are float32 [batch, len]."""

    ids: Tensor
    targets: Tensor
    weights: Tensor

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()


def collate(samples: list[Sample]) -> Batch:
    """Pad on the right to a multiple of LEN_STEP. Padding is id 0;
    a causal model never sees it from the left."""
    longest = max(len(sample.ids) for sample in samples) - 1
    length = -(-longest // LEN_STEP) * LEN_STEP
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    targets = torch.full((len(samples), length), IGNORED, dtype=torch.int64)
    weights = torch.ones(len(samples), length)
    for row, sample in enumerate(samples):
        tokens = torch.tensor(sample.ids, dtype=torch.int64)
        learnt = torch.tensor(sample.is_target[1:], dtype=torch.bool)
        ids[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = torch.where(learnt, tokens[1:], IGNORED)
        if sample.is_named:
            named = torch.tensor(sample.is_named[1:], dtype=torch.bool)
            weights[row, : len(tokens) - 1][named] = NAMED_WEIGHT
    return Batch(ids, targets, weights)


def split_by_len(samples: list[Sample], max_tokens: int) -> list[Batch]:
    """Sort by length and cut into batches of at most `max_tokens` positions
    (at least one sample each)."""
    batches: list[Batch] = []
    group: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        length = -(-(len(sample.ids) - 1) // LEN_STEP) * LEN_STEP
        if group and length * (len(group) + 1) > max_tokens:
            batches.append(collate(group))
            group = []
        group.append(sample)
    if group:
        batches.append(collate(group))
    return batches


class BatchPool:
    """The batches of one pool of samples in a random order;
    a left-over that is less than half full is dropped."""

    def __init__(self, source: MixedSource, max_tokens: int, seed: int) -> None:
        self._source = source
        self._max_tokens = max_tokens
        self._seed = seed

    def batches(self, index: int, progress: float) -> list[Batch]:
        rng = random.Random(f"{self._seed}/{index}")
        samples = [self._source.draw(rng, progress) for _ in range(POOL_SAMPLES)]
        batches = split_by_len(
            [sample for sample in samples if len(sample.ids) > 1], self._max_tokens
        )
        full = [batch for batch in batches if batch.num_tokens * 2 > self._max_tokens]
        rng.shuffle(full)
        return full
