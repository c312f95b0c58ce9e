"""Work held against what the machine allows: exact operations and bytes over measured limits.

Measures nothing: limits come from `quire.bench.limits`, from the same seconds as the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.bench.operations import StepCost


class Peaks(NamedTuple):
    """Limits, the medians over the samples of some seconds."""

    read_bytes_per_s: float
    gemm_flops_per_s: Mapping[str, float]
    """The best matrix product of each data type that is near the best of its kind (floating point,
    int8)."""
    products: Mapping[str, str]
    """Whose product that was, and of which shape."""
    num_samples: int

    @property
    def best_dtype(self) -> str:
        """Of floating-point numbers, those with the quickest product."""
        return max(
            (dtype for dtype in self.gemm_flops_per_s if dtype != "int8"),
            key=self.gemm_flops_per_s.__getitem__,
        )

    @property
    def best_gemm(self) -> float:
        """The rate that operations are compared with:
        the best product of floating-point numbers."""
        return self.gemm_flops_per_s[self.best_dtype]

    @property
    def best_product(self) -> float:
        """The best product of any data type."""
        return max(self.gemm_flops_per_s.values())


class Attained(NamedTuple):
    """Work done against the machine's limits, and these limits."""

    flops: int
    num_bytes: int
    flops_share: float
    """Rate of operations over the whole time, as a share of the best matrix product."""
    bytes_share: float
    """Rate of bytes over the whole time, as a share of the read bandwidth."""
    roofline_share: float
    """Time that the steps need at least, each the larger of its operations and its bytes at the
    peaks, over the time taken."""
    peak_flops_per_s: float
    peak_bytes_per_s: float
    num_samples: int
    """Of the limits."""


def attained(costs: Sequence[StepCost], wall_s: float, peaks: Peaks) -> Attained:
    """Compare steps that took `wall_s` together with the peaks."""
    flops, num_bytes = sum(cost.flops for cost in costs), sum(cost.num_bytes for cost in costs)
    bound_s = sum(
        max(cost.flops / peaks.best_gemm, cost.num_bytes / peaks.read_bytes_per_s) for cost in costs
    )
    return Attained(
        flops=flops,
        num_bytes=num_bytes,
        flops_share=flops / wall_s / peaks.best_gemm,
        bytes_share=num_bytes / wall_s / peaks.read_bytes_per_s,
        roofline_share=bound_s / wall_s,
        peak_flops_per_s=peaks.best_gemm,
        peak_bytes_per_s=peaks.read_bytes_per_s,
        num_samples=peaks.num_samples,
    )
