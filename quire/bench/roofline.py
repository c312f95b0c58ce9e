"""What this machine can do at best, measured in the same run: read bandwidth and the rate of matrix products.

Peaks are the best of several tries on as many threads as the engine has, so that noise makes them too low rather than too
high; a share of a peak above one would show that. A shared machine's speed swings within minutes by as much as half, so that
work is held against the peaks measured right before and right after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.bench.operations import StepCost

_READ_BYTES = 256 << 20
"""Several times any cache."""
_GEMM_SHAPES = ((256, 1024, 4096), (512, 2048, 8192), (1024, 1024, 4096))
_GPU_READ_BYTES, _GPU_GEMM_SHAPES = 4 << 30, ((8192, 8192, 8192),)
_MIN_TRIES = 3
_BUDGET_S = 0.6


class Peaks(NamedTuple):
    """Measured limits."""

    read_bytes_per_s: float
    gemm_flops_per_s: dict[str, float]
    """Best matrix product per dtype; the engine's own dtype decides, or a better one."""

    @property
    def best_dtype(self) -> str:
        """Of floating-point numbers, those with the quickest product."""
        return max((dtype for dtype in self.gemm_flops_per_s if dtype != "int8"), key=self.gemm_flops_per_s.__getitem__)

    @property
    def best_gemm(self) -> float:
        """The rate that operations are compared with: the best product of floating-point numbers."""
        return self.gemm_flops_per_s[self.best_dtype]

    def between(self, later: Peaks) -> Peaks:
        """The mean of these and later ones, for what was done meanwhile; of the dtypes that both know."""
        rates = {dtype: (self.gemm_flops_per_s[dtype] + rate) / 2 for dtype, rate in later.gemm_flops_per_s.items()}
        return Peaks((self.read_bytes_per_s + later.read_bytes_per_s) / 2, rates)


class Attained(NamedTuple):
    """Work done against the machine's limits, and these limits."""

    flops: int
    num_bytes: int
    flops_share: float
    """Rate of operations over the whole time, as a share of the best matrix product."""
    bytes_share: float
    """Rate of bytes over the whole time, as a share of the read bandwidth."""
    roofline_share: float
    """Time that the steps need at least, each the larger of its operations and its bytes at the peaks, over the time taken."""
    peak_flops_per_s: float
    peak_bytes_per_s: float


def measure_peaks(dtypes: Sequence[str] = ("float32", "bfloat16", "int8"), device: str = "cpu") -> Peaks:
    """Measure a GPU, or the CPU with torch's present number of threads; takes a few seconds."""
    import torch

    is_gpu = device != "cpu"
    num_bytes, shapes = (_GPU_READ_BYTES, _GPU_GEMM_SHAPES) if is_gpu else (_READ_BYTES, _GEMM_SHAPES)
    wait = torch.cuda.synchronize if is_gpu else _nothing
    with torch.inference_mode():
        data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        read_s = _best_s(lambda: (data.sum(), wait()))
        rates = {}
        for dtype in dtypes:
            best = 0.0
            # The products of 8-bit integers have no public name in torch; this one has been there since 2.1.
            product = torch._int_mm if dtype == "int8" else torch.mm
            for rows, inner, columns in shapes:
                a = torch.ones(rows, inner, dtype=getattr(torch, dtype), device=device)
                b = torch.ones(columns, inner, dtype=getattr(torch, dtype), device=device).T
                seconds = _best_s(lambda product=product, a=a, b=b: (product(a, b), wait()))  # type: ignore[misc]
                best = max(best, 2 * rows * inner * columns / seconds)
            rates[dtype] = best
    return Peaks(num_bytes / read_s, rates)


def _nothing() -> None:
    """A CPU's work is done when the call returns."""


def attained(costs: Sequence[StepCost], wall_s: float, peaks: Peaks) -> Attained:
    """Compare steps that took `wall_s` together with the peaks."""
    flops, num_bytes = sum(cost.flops for cost in costs), sum(cost.num_bytes for cost in costs)
    bound_s = sum(max(cost.flops / peaks.best_gemm, cost.num_bytes / peaks.read_bytes_per_s) for cost in costs)
    return Attained(
        flops=flops,
        num_bytes=num_bytes,
        flops_share=flops / wall_s / peaks.best_gemm,
        bytes_share=num_bytes / wall_s / peaks.read_bytes_per_s,
        roofline_share=bound_s / wall_s,
        peak_flops_per_s=peaks.best_gemm,
        peak_bytes_per_s=peaks.read_bytes_per_s,
    )


def _best_s(work: Callable[[], object]) -> float:
    """The quickest try; the first one warms up."""
    work()
    best, num_tries, started = float("inf"), 0, time.perf_counter()
    while num_tries < _MIN_TRIES or (time.perf_counter() - started < _BUDGET_S and num_tries < 20):
        before = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - before)
        num_tries += 1
    return best
