"""Tables of what is added to scores by relative position (T5, arXiv:1910.10683)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def position_bias(table: Tensor, max_distance: int, max_model_len: int) -> Tensor:
    """From buckets to distances: float32 [heads, 2 * max_model_len - 1], whose middle column is for
    a key at its query's own position, and the next for the key behind it. table is [buckets,
    heads].
    """
    distances = torch.arange(1 - max_model_len, max_model_len)
    return table[_buckets(distances, len(table), max_distance)].T.contiguous()


def _buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """A half of the buckets for each direction; half of those for single distances, the others in a
    logarithmic scale. In float32 and this order, as the models were trained."""
    half = num_buckets // 2
    exact = half // 2
    away = distances.abs()
    scaled = torch.log(away.float() / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + scaled.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(away < exact, away, far) + half * (distances > 0).long()
