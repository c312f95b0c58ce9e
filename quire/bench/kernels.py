"""The CPU's projections against what this machine can do: `quire bench kernels`.

Owns the measurement of one projection [N, K] in each weight format at several numbers of rows, and
of the limits that it is compared with: multiply-adds per second and bytes per second, both from
native loops that do nothing else, in the same run. Several copies of a weight are used in turn,
together larger than the caches, as the weights of a model are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.cpu.linear import CpuLinear
    from quire.kernels.interface import QuantizedWeight

_READ_BYTES = 1 << 30
"""Several times a large server's cache; and what the copies of a weight take together at least."""
_PROBE_ROUNDS = 3_000_000
_NUM_PROBES = 5
_BUDGET_S = 0.25


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A way to store a weight and to multiply it."""

    bits: int
    group_size: int = 0
    """Inputs that share a scale; 0: all."""
    has_int8_inputs: bool = False


KINDS = {
    "f32": WeightKind(32),
    "bf16": WeightKind(16),
    "int8": WeightKind(8, has_int8_inputs=True),
    "int8-g128": WeightKind(8, 128, has_int8_inputs=True),
    "int4-g128": WeightKind(4, 128, has_int8_inputs=True),
    "int4-g32": WeightKind(4, 32, has_int8_inputs=True),
    "int8-float": WeightKind(8),
    "int4-g128-float": WeightKind(4, 128),
}
"""Names of kinds; those that end in `float` leave the inputs in floating point."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at most, on the threads in use."""

    isa: str
    num_threads: int
    float_ops_per_s: float
    bf16_ops_per_s: float
    """Of instructions for bfloat16, where there are some."""
    integer_ops_per_s: float
    half_byte_ops_per_s: float
    """Of int8 inputs and weights of four bits."""
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LinearTime:
    """One projection of `num_rows` rows."""

    kind: str
    num_rows: int
    seconds: float
    ops_per_s: float
    bytes_per_s: float
    """Bytes of the packed weight over the time."""
    ops_share: float
    bytes_share: float

    @property
    def roofline_share(self) -> float:
        """The least time that the operations or the bytes need, over the time taken."""
        return max(self.ops_share, self.bytes_share)


def measure_limits() -> Limits:
    """Return the best of several tries; takes some two seconds."""
    import torch

    from quire.kernels import cpu
    from quire.kernels.cpu import _native

    data = torch.ones(_READ_BYTES, dtype=torch.uint8)
    return Limits(
        isa=cpu.isa(),
        num_threads=cpu.num_threads(),
        float_ops_per_s=max(_native.probe_floats(_PROBE_ROUNDS) for _ in range(_NUM_PROBES)),
        bf16_ops_per_s=max(_native.probe_pairs(_PROBE_ROUNDS) for _ in range(_NUM_PROBES)),
        integer_ops_per_s=max(_native.probe_integers(_PROBE_ROUNDS) for _ in range(_NUM_PROBES)),
        half_byte_ops_per_s=max(
            _native.probe_half_bytes(_PROBE_ROUNDS) for _ in range(_NUM_PROBES)
        ),
        read_bytes_per_s=max(
            _native.probe_read(data.data_ptr(), data.nbytes) for _ in range(_NUM_PROBES)
        ),
    )


def measure_linear(
    kind: str, shape: tuple[int, int], rows: Sequence[int], limits: Limits
) -> Iterator[LinearTime]:
    """Yield a time for each number of rows, of a projection of `shape` (outputs, inputs)."""
    import torch

    from quire.kernels.cpu.linear import CpuLinear, linear

    if kind not in KINDS:
        raise ConfigError(f"there are no weights called {kind!r}; choose among {', '.join(KINDS)}")
    packed = pack_random(KINDS[kind], shape)
    num_copies = 1 + _READ_BYTES // packed.num_bytes
    copies = [
        packed,
        *(CpuLinear(packed.layout, packed.data.clone()) for _ in range(num_copies - 1)),
    ]
    peak = _peak(kind, limits)
    for num_rows in rows:
        x = torch.randn(
            num_rows, shape[1], dtype=torch.bfloat16 if kind == "bf16" else torch.float32
        )
        seconds = _best_s([lambda each=each, x=x: linear(x, each) for each in copies])  # type: ignore[misc]
        ops_per_s, bytes_per_s = (
            2 * num_rows * shape[0] * shape[1] / seconds,
            packed.num_bytes / seconds,
        )
        shares = (ops_per_s / peak, bytes_per_s / limits.read_bytes_per_s)
        yield LinearTime(kind, num_rows, seconds, ops_per_s, bytes_per_s, *shares)


def _peak(kind: str, limits: Limits) -> float:
    weights = KINDS[kind]
    if weights.has_int8_inputs:
        return limits.half_byte_ops_per_s if weights.bits == 4 else limits.integer_ops_per_s
    return limits.bf16_ops_per_s if kind == "bf16" else limits.float_ops_per_s


def render(limits: Limits, times: Sequence[LinearTime]) -> Iterator[str]:
    """Yield a table in Markdown, line by line."""
    yield (
        f"{limits.isa}, {limits.num_threads} threads: {limits.float_ops_per_s / 1e9:.0f} "
        "GFLOP/s in float32, "
        f"{limits.bf16_ops_per_s / 1e9:.0f} in bfloat16, "
        f"{limits.integer_ops_per_s / 1e9:.0f} Gop/s in int8, "
        f"{limits.half_byte_ops_per_s / 1e9:.0f} with weights of four bits, "
        f"reads {limits.read_bytes_per_s / 1e9:.1f} GB/s"
    )
    yield ""
    yield "| weight | rows | time (us) | Gop/s | of peak | GB/s | of reads | of the nearer limit |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for each in times:
        yield (
            f"| {each.kind} | {each.num_rows} | {each.seconds * 1e6:.0f} | "
            f"{each.ops_per_s / 1e9:.0f} "
            f"| {each.ops_share:.0%} | {each.bytes_per_s / 1e9:.2f} | {each.bytes_share:.0%} "
            f"| {each.roofline_share:.0%} |"
        )


def pack_random(kind: WeightKind, shape: tuple[int, int]) -> CpuLinear:
    """Pack a weight [outputs, inputs] of random values: they compute as fast as trained ones."""
    import torch

    from quire.kernels.cpu.linear import pack_linear, pack_quantized

    if kind.bits >= 16:
        return pack_linear(
            torch.randn(shape, dtype=torch.float32 if kind.bits == 32 else torch.bfloat16)
        )
    return pack_quantized(_quantized(kind, shape))


def _quantized(kind: WeightKind, shape: tuple[int, int]) -> QuantizedWeight:
    import torch

    from quire.kernels.interface import QuantizedWeight

    size = kind.group_size or shape[1]
    if shape[1] % size:
        raise ConfigError(
            f"groups of {size} do not divide {shape[1]} inputs; choose another shape or kind"
        )
    values: Tensor = torch.randint(-7, 8, shape).to(torch.int8)
    scales = torch.rand(shape[0], shape[1] // size)
    activations = "int8" if kind.has_int8_inputs else "float"
    return QuantizedWeight(values, scales, None, 4 if kind.bits == 4 else 8, size, activations)  # type: ignore[arg-type]


def _best_s(works: Sequence[Callable[[], object]]) -> float:
    """Return the quickest of the works, each done at least once, for as long as the budget
    lasts."""
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < _BUDGET_S:
        for work in works:
            before = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - before)
            if time.perf_counter() - started > 2 * _BUDGET_S:
                break
    return best
