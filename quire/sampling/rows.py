"""What the sampler is told of one row of logits, and how one row's failure is reported.
Holds no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import RowSampling

TokenIds = NDArray[np.integer[Any]] | Sequence[int]
"""Integers [length]; an array is not copied unless it has to be."""


class RowError(Exception):
    """This row alone cannot be sampled; its text goes into `WorkResult.error`.
    Never leaves the sampler."""


class SampledRow(NamedTuple):
    """One row of logits and what is wanted of it."""

    sampling: RowSampling
    position: int
    """Absolute position of the token to be sampled: the number of tokens before it."""
    prompt_token_ids: TokenIds = ()
    """Integers [prompt length]; read for repetition penalties and processors only."""
    output_token_ids: TokenIds = ()
    """Integers [output length]; read for penalties, bad words, `min_tokens` and processors only."""
    num_samples: int = 1
    """Tokens to draw; draw i uses `derive_seed(sampling.seed, i)`."""
    num_candidates: int = 0
    """Where above 0, beam search: this many best tokens are reported instead,
    and nothing is drawn."""
    row: int = 0
    """Its row in the worker's batch, by which state is kept between steps. Those of one batch with
    the same are positions of one sequence, in order: their outputs go on from each other."""
