"""The small tensors that the sampling kernels take, from numbers of rows,
on the device of the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.sampling import ScaledRows, Thresholds


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Put numbers into an int64 tensor [N]."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def floats(values: Sequence[float], device: torch.device) -> Tensor:
    """Put numbers into a float32 tensor [N]."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def scaled_rows(rows: Sequence[tuple[int, float, float]], device: torch.device) -> ScaledRows:
    """Put (row of the logits, its max_logit, its scale) of N rows into tensors."""
    numbers, max_logits, scales = zip(*rows, strict=True)
    return ScaledRows(integers(numbers, device), floats(max_logits, device), floats(scales, device))


def thresholds_of(thresholds: Sequence[tuple[float, int]], device: torch.device) -> Thresholds:
    """Put (least value kept, last token id kept of that value) of N rows into tensors."""
    values, token_ids = zip(*thresholds, strict=True)
    return Thresholds(floats(values, device), integers(token_ids, device))
