"""Plain rows: the model's own logits, one token, no log-probabilities. Their tokens can stay where
they were sampled.

Owns the question which rows these are, and their path through the kernels, on which nothing is read
back from the device:
not the tokens, nor whether the logits were finite. `Sampler.sample` gives the same tokens and the
same errors. Holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.common.seeds import derive_seed
from quire.core.plan import RowSampling
from quire.kernels.sampling import Draws, Filters, Keys, SamplingKernels, ScaledRows, Thresholds
from quire.sampling.edits import is_edited
from quire.sampling.rows import SampledRow

Stage = Callable[[Sequence[NDArray[Any]]], list[Tensor]]
"""Moves arrays to the device of the logits."""


def is_plain(sampling: RowSampling) -> bool:
    """Test whether the request edits no logits at any position, and wants no log-probabilities."""
    return sampling.num_logprobs is None and not is_edited(SampledRow(sampling, position=0))


def choose_plain(
    kernels: SamplingKernels, logits: Tensor, rows: Sequence[SampledRow], stage: Stage
) -> tuple[Tensor, Tensor]:
    """Choose one token for each row of logits, ids int64 [R] below V, and each row's largest logit,
    float32 [R].

    Where that is not finite the row has failed: its token means nothing, and its logits are
    overwritten.
    """
    logits = logits.contiguous()
    token_ids, max_logits = kernels.argmax(logits)
    drawn = [place for place, row in enumerate(rows) if row.sampling.temperature != 0.0]
    filtered = [place for place in drawn if has_filters(rows[place].sampling, logits.shape[1])]
    free = [place for place in drawn if not has_filters(rows[place].sampling, logits.shape[1])]
    # the kernels count on rows whose largest logit is a number, and the others cannot be left out
    if drawn:
        is_odd = ~torch.isfinite(max_logits)
        logits.masked_fill_(is_odd[:, None], 0.0)
        finite_max_logits = max_logits.masked_fill(is_odd, 0.0)
    for places in filter(None, (free, filtered)):
        row, scale, seed, position, *limits = stage(
            _arrays(rows, places, logits.shape[1], is_filtered=places is filtered)
        )
        scaled = ScaledRows(row, finite_max_logits.index_select(0, row), scale)
        thresholds: Thresholds | None = (
            kernels.thresholds(logits, scaled, Filters(*limits)) if limits else None
        )
        token_ids.index_copy_(
            0, row, kernels.draw(logits, scaled, thresholds, Keys(seed, position))
        )
    return token_ids.clamp_(0, logits.shape[1] - 1), max_logits


def _arrays(
    rows: Sequence[SampledRow], places: Sequence[int], vocab_size: int, *, is_filtered: bool
) -> list[NDArray[Any]]:
    """Return the fields of `ScaledRows` but for the max logit, of `Keys` and, where there are any,
    of `Filters`, for one draw each."""
    chosen = [rows[place] for place in places]
    samplings = [row.sampling for row in chosen]
    arrays: list[NDArray[Any]] = [
        np.array(places, np.int64),
        np.array([scale_of(each) for each in samplings], np.float32),
        np.array([signed(derive_seed(each.seed, 0)) for each in samplings], np.int64),
        np.array([row.position for row in chosen], np.int64),
    ]
    if is_filtered:
        arrays.append(
            np.array([min(each.top_k or vocab_size, vocab_size) for each in samplings], np.int64)
        )
        arrays.append(np.array([each.top_p for each in samplings], np.float64))
        arrays.append(np.array([min_p_threshold(each) for each in samplings], np.float32))
    return arrays


def draws_of(rows: Sequence[SampledRow]) -> Draws:
    """Return the draws of rows that are not greedy, `num_samples` for each, row after row."""
    drawn = [(place, row) for place, row in enumerate(rows) if row.sampling.temperature != 0.0]
    chosen = [(place, row, index) for place, row in drawn for index in range(row.num_samples)]
    arrays = (
        np.array([place for place, _, _ in chosen], np.int64),
        np.array([scale_of(row.sampling) for _, row, _ in chosen], np.float32),
        np.array(
            [signed(derive_seed(row.sampling.seed, index)) for _, row, index in chosen], np.int64
        ),
        np.array([row.position for _, row, _ in chosen], np.int64),
    )
    row, scale, seed, position = map(torch.from_numpy, arrays)
    return Draws(row, scale, Keys(seed, position))


def has_filters(sampling: RowSampling, vocab_size: int) -> bool:
    """Return whether top-k, top-p or min-p may remove a token."""
    return 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0


def scale_of(sampling: RowSampling) -> float:
    """1 / temperature as float32 has it; 1 for greedy rows."""
    return 1.0 if sampling.temperature == 0.0 else float(np.float32(1.0 / sampling.temperature))


def min_p_threshold(sampling: RowSampling) -> float:
    """`Filters.floor` for a request's min-p."""
    return math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf


def signed(bits: int) -> int:
    """64 bits as the signed number that an int64 tensor holds."""
    return bits - (1 << 64) if bits >> 63 else bits
