"""The best of each row, the lowest id among equals, in Triton. Not run on a GPU yet.

Bits cannot depend on anything: a maximum has no order of rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.checks import launch_options

_BLOCK = 4096
_MAX_ID = tl.constexpr(9223372036854775807)


@triton.jit
def row_argmax_kernel(
    values, ids, best_values, best_ids, num_columns, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Row program_id(0) of values float32 [R, C]: its largest, and the lowest id of those as large
    (its column without ids).

    NaN where the row holds one.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], _MAX_ID, tl.int64)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_columns, BLOCK):
        columns = first + lanes
        is_column = columns < num_columns
        value = tl.load(values + row * num_columns + columns, mask=is_column, other=float("-inf"))
        if HAS_IDS:
            found = tl.load(ids + row * num_columns + columns, mask=is_column, other=_MAX_ID)
        else:
            found = tl.where(is_column, columns.to(tl.int64), _MAX_ID)
        has_nan = has_nan | (value != value).to(tl.int32)
        is_better = (value > best) | ((value == best) & (found < best_id))
        best = tl.where(is_better, value, best)
        best_id = tl.where(is_better, found, best_id)
    row_max = tl.max(best, axis=0)
    token_id = tl.min(tl.where(best == row_max, best_id, _MAX_ID), axis=0)
    any_nan = tl.max(has_nan, axis=0) > 0
    tl.store(best_values + row, tl.where(any_nan, float("nan"), row_max))
    tl.store(best_ids + row, tl.where(any_nan, 0, token_id))


def argmax_of_rows(values: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ids int64 [R] and values float32 [R] of the largest of each row of float32 [R, C]."""
    num_rows, num_columns = values.shape
    best_values = torch.empty(num_rows, dtype=torch.float32, device=values.device)
    best_ids = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(num_columns))
        row_argmax_kernel[(num_rows,)](
            values, best_ids if ids is None else ids, best_values, best_ids, num_columns,
            HAS_IDS=ids is not None, BLOCK=block, **launch_options(num_warps=8),
        )  # fmt: skip
    return best_ids, best_values
