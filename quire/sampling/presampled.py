"""Results of rows whose tokens were chosen without the sampler, by a fused LM head or `plain`.

A plain greedy row (`quire.sampling.plain`) needs its argmax alone, a plain row without filters the
token that was drawn; logits need not exist for either. Where they do, `Sampler` gives the same
tokens and the same errors. Holds no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from quire.core.plan import NOT_FINITE, WorkResult
from quire.sampling.rows import SampledRow


def greedy_results(best: tuple[Tensor, Tensor], nums_samples: Sequence[int]) -> list[WorkResult]:
    """Return what `Sampler.sample` gives for plain rows: their tokens int64 [R],
    and their largest logits [R]."""
    token_ids, max_logits = best
    return [
        WorkResult((token_id,) * num_samples)
        if math.isfinite(max_logit)
        else WorkResult(error=NOT_FINITE)
        for token_id, max_logit, num_samples in zip(
            token_ids.tolist(), max_logits.tolist(), nums_samples, strict=True
        )
    ]


def drawn_results(
    found: tuple[Tensor, Tensor, Tensor], rows: Sequence[SampledRow]
) -> list[WorkResult]:
    """Return the same where some rows are drawn from: those tokens, int64 [n],
    are in the order of `quire.sampling.plain.draws_of`."""
    best_ids, max_logits, drawn = (each.tolist() for each in found)
    tokens, results = iter(drawn), []
    for row, best_id, max_logit in zip(rows, best_ids, max_logits, strict=True):
        count = row.num_samples
        chosen = (
            (best_id,) * count if row.sampling.temperature == 0.0 else tuple(islice(tokens, count))
        )
        results.append(
            WorkResult(chosen) if math.isfinite(max_logit) else WorkResult(error=NOT_FINITE)
        )
    return results
