"""Greedy rows that nothing is to be done to: the best token of the model's own logits is the answer, and all of it.

Owns the question which rows these are, and the answer's form. The logits need not exist for them; where they do, `Sampler`
gives the same tokens and the same errors. Holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from quire.core.plan import NOT_FINITE, RowSampling, WorkResult
from quire.sampling.plain import is_plain


def is_plain_greedy(sampling: RowSampling) -> bool:
    """Whether the request takes the best token, edits no logits at any position, and asks for no log-probabilities."""
    return sampling.temperature == 0.0 and is_plain(sampling)


def greedy_results(best: tuple[Tensor, Tensor], nums_samples: Sequence[int]) -> list[WorkResult]:
    """What `Sampler.sample` gives for rows of which `is_plain_greedy` holds: best tokens int64 [R], their logits [R]."""
    token_ids, peaks = best
    return [
        WorkResult((token_id,) * num_samples) if math.isfinite(peak) else WorkResult(error=NOT_FINITE)
        for token_id, peak, num_samples in zip(token_ids.tolist(), peaks.tolist(), nums_samples, strict=True)
    ]
