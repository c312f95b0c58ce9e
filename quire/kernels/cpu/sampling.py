"""The native sampling kernels (csrc/cpu/sampling.cpp): the reference's results to the bit, a row to
a thread.

Owns the checks between tensors and raw pointers, as `checks` does for the other kernels, and
nothing of the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu import IMPORT_ERROR
from quire.kernels.cpu.checks import address, indices_address, int32_address, vector_address
from quire.kernels.sampling import Filters, Keys, Penalties, ScaledRows, Scores, Thresholds

if IMPORT_ERROR is None:
    from quire.kernels.cpu import _native


class NativeSampling:
    """`SamplingKernels` for float32 logits on the CPU. Holds no state; needs the extension."""

    name = "cpu"

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = logits.shape[0]
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        values = torch.empty(num_rows, dtype=torch.float32)
        _native.sampling_peaks(*_logits_arguments(logits), token_ids.data_ptr(), values.data_ptr())
        return token_ids, values

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        count = penalties.row.numel()
        _native.sampling_penalise(
            *_logits_arguments(logits),
            indices_address(penalties.row, "row", count),
            count,
            int32_address(penalties.token_ids, "token_ids"),
            penalties.token_ids.numel(),
            indices_address(penalties.start, "start", count + 1),
            indices_address(penalties.output_start, "output_start", count),
            vector_address(penalties.repetition, "repetition", torch.float32, count),
            vector_address(penalties.frequency, "frequency", torch.float32, count),
            vector_address(penalties.presence, "presence", torch.float32, count),
        )

    def thresholds(self, logits: Tensor, rows: ScaledRows, filters: Filters) -> Thresholds:
        count = rows.row.numel()
        thresholds = Thresholds(
            torch.empty(count, dtype=torch.float32), torch.empty(count, dtype=torch.int64)
        )
        _native.sampling_cuts(
            *_rows_arguments(logits, rows),
            indices_address(filters.top_k, "top_k", count),
            vector_address(filters.top_p, "top_p", torch.float64, count),
            vector_address(filters.floor, "floor", torch.float32, count),
            thresholds.value.data_ptr(),
            thresholds.token_id.data_ptr(),
        )
        return thresholds

    def draw(
        self, logits: Tensor, rows: ScaledRows, thresholds: Thresholds | None, keys: Keys
    ) -> Tensor:
        count = rows.row.numel()
        token_ids = torch.empty(count, dtype=torch.int64)
        _native.sampling_draw(
            *_rows_arguments(logits, rows),
            *_threshold_arguments(thresholds, count),
            indices_address(keys.seed, "seed", count),
            indices_address(keys.position, "position", count),
            token_ids.data_ptr(),
        )
        return token_ids

    def score(
        self,
        logits: Tensor,
        rows: ScaledRows,
        thresholds: Thresholds | None,
        token_ids: Tensor,
        *,
        num_top: int = 0,
    ) -> Scores:
        count = rows.row.numel()
        total, rank = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        top_ids = torch.empty((count, num_top), dtype=torch.int64)
        _native.sampling_score(
            *_rows_arguments(logits, rows),
            *_threshold_arguments(thresholds, count),
            indices_address(token_ids, "token_ids", count),
            num_top,
            total.data_ptr(),
            rank.data_ptr(),
            top_ids.data_ptr(),
        )
        return Scores(total, rank, top_ids)


def gumbel_noise(seed: int, position: int, num_tokens: int) -> Tensor:
    """Return the noise of tokens 0 ... num_tokens - 1 (float32); the draws use it without storing
    it."""
    out = torch.empty(num_tokens, dtype=torch.float32)
    _native.sampling_noise(seed, position, num_tokens, out.data_ptr())
    return out


def _logits_arguments(logits: Tensor) -> tuple[int, int, int]:
    if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.shape[1] == 0:
        raise TypeError(
            f"logits are {logits.dtype} {list(logits.shape)}; expected float32 [R, V], V above 0"
        )
    return (address(logits, "logits"), *logits.shape)


def _rows_arguments(logits: Tensor, rows: ScaledRows) -> tuple[int, ...]:
    count = rows.row.numel()
    return (
        *_logits_arguments(logits),
        indices_address(rows.row, "row", count),
        vector_address(rows.max_logit, "max_logit", torch.float32, count),
        vector_address(rows.scale, "scale", torch.float32, count),
        count,
    )


def _threshold_arguments(thresholds: Thresholds | None, count: int) -> tuple[int, int]:
    if thresholds is None:
        return 0, 0
    return (
        vector_address(thresholds.value, "threshold value", torch.float32, count),
        indices_address(thresholds.token_id, "threshold token_id", count),
    )
