"""Rows whose tokens are known from elsewhere than the sampler, with their largest logits: the form of their results.

Of plain greedy rows (`quire.sampling.plain`) the best token is all of the answer. The logits need not exist for them; where
they do, `Sampler` gives the same tokens and the same errors. Holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from quire.core.plan import NOT_FINITE, WorkResult


def greedy_results(best: tuple[Tensor, Tensor], nums_samples: Sequence[int]) -> list[WorkResult]:
    """What `Sampler.sample` gives for plain rows: their tokens int64 [R], and their largest logits [R]."""
    token_ids, peaks = best
    return [
        WorkResult((token_id,) * num_samples) if math.isfinite(peak) else WorkResult(error=NOT_FINITE)
        for token_id, peak, num_samples in zip(token_ids.tolist(), peaks.tolist(), nums_samples, strict=True)
    ]
