"""The GPU's kernels against what the GPU can do: `quire bench kernels --device cuda`.

Owns the cases (projections, attention, the small kernels and sampling, with the shapes of an 8-billion-parameter model), their
timing, and the two limits that they are compared with, measured in the same run: bytes per second of a large copy, and
operations per second of torch's own matrix product. Before each timed call a buffer larger than the L2 is written, as in a
real step the weights come from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.kernels.interface import AttentionBatch
    from quire.kernels.triton.kernels import TritonKernels

_FLUSH_BYTES = 256 << 20
"""More than any GPU's L2."""
_COPY_BYTES = 2 << 30
_MATRIX_SIZE = 8192
_NUM_WARM_UPS, _NUM_TRIES = 3, 10
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_SIZE, _VOCABULARY = 4096, 32, 8, 128, 128_256


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What the device does at most."""

    name: str
    copy_bytes_per_s: float
    matrix_ops_per_s: float
    """Of bfloat16."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call, and the least that it must do."""

    name: str
    call: Callable[[], object]
    num_bytes: int
    """That must be read or written at least once."""
    num_ops: int = 0
    """Of matrix products; a multiplication and an addition are two."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The median of several calls."""

    name: str
    seconds: float
    bytes_per_s: float
    ops_per_s: float
    roofline_share: float
    """The least time that the bytes or the operations need, over the time taken."""


def measure_limits(device: torch.device) -> GpuLimits:
    """Takes about a second."""
    import torch

    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    a, b = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    matrix_s = median_s(lambda: torch.mm(a, b), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return GpuLimits(name, 2 * _COPY_BYTES / copy_s, 2 * _MATRIX_SIZE**3 / matrix_s)


def median_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds on the device's own clock, with a cold L2."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(_NUM_WARM_UPS):
        call()
    times: list[float] = []
    for _ in range(_NUM_TRIES):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def cases(kernels: TritonKernels) -> Iterator[Case]:
    """One after another, so that one case's tensors are in memory at a time."""
    for num_rows in (1, 16, 64, 512, 4096):
        yield _linear(kernels, num_rows)
        yield from _integers(kernels, num_rows)
    for num_sequences, context in ((1, 4096), (64, 1024), (64, 8192), (1, 131_072)):
        yield _attention(kernels, [1] * num_sequences, [context] * num_sequences)
    for query_len, context in ((2048, 2048), (512, 8192)):
        yield _attention(kernels, [query_len], [context])
    yield from _small(kernels)
    yield from _sampling(kernels)


def measure(case: Case, limits: GpuLimits, device: torch.device) -> KernelTime:
    """Time one case."""
    seconds = median_s(case.call, device)
    least = max(case.num_bytes / limits.copy_bytes_per_s, case.num_ops / limits.matrix_ops_per_s)
    return KernelTime(case.name, seconds, case.num_bytes / seconds, case.num_ops / seconds, least / seconds)


def render(limits: GpuLimits, times: Sequence[KernelTime]) -> Iterator[str]:
    """A table in Markdown, line by line."""
    rates = f"copies {limits.copy_bytes_per_s / 1e9:.0f} GB/s, bfloat16 {limits.matrix_ops_per_s / 1e12:.0f} TFLOP/s"
    yield f"{limits.name}: {rates}"
    yield ""
    yield "| kernel | time (us) | GB/s | TFLOP/s | of the nearer limit |"
    yield "|---|---:|---:|---:|---:|"
    for each in times:
        yield (
            f"| {each.name} | {each.seconds * 1e6:.1f} | {each.bytes_per_s / 1e9:.0f} | {each.ops_per_s / 1e12:.1f} "
            f"| {each.roofline_share:.0%} |"
        )


def _linear(kernels: TritonKernels, num_rows: int) -> Case:
    import torch

    weight = torch.randn(_HIDDEN, _HIDDEN, device=kernels.device, dtype=torch.bfloat16)
    packed = kernels.pack_linear(weight)
    x = torch.randn(num_rows, _HIDDEN, device=kernels.device, dtype=torch.bfloat16)
    ops = 2 * num_rows * _HIDDEN * _HIDDEN
    return Case(f"linear bf16, {num_rows} rows", lambda: kernels.linear(x, packed), weight.nbytes + 2 * x.nbytes, ops)


def _integers(kernels: TritonKernels, num_rows: int) -> Iterator[Case]:
    import torch

    from quire.kernels.interface import QuantizedWeight

    x = torch.randn(num_rows, _HIDDEN, device=kernels.device, dtype=torch.bfloat16)
    ops = 2 * num_rows * _HIDDEN * _HIDDEN
    for bits, group, activations in ((8, _HIDDEN, "int8"), (4, 128, "int8"), (4, 128, "float")):
        values = torch.randint(-7, 8, (_HIDDEN, _HIDDEN), dtype=torch.int8)
        scales = torch.rand(_HIDDEN, _HIDDEN // group)
        packed = kernels.pack_quantized(QuantizedWeight(values, scales, None, bits, group, activations))  # type: ignore[arg-type]
        name = f"linear int{bits} in groups of {group}, {activations} inputs, {num_rows} rows"
        yield Case(name, lambda packed=packed: kernels.linear(x, packed), packed.num_bytes + 2 * x.nbytes, ops)  # type: ignore[misc]


def _attention(kernels: TritonKernels, query_lens: list[int], contexts: list[int]) -> Case:
    import torch

    block_size = 16
    num_blocks = sum(math.ceil(context / block_size) for context in contexts)
    shape = (num_blocks, _KV_HEADS, block_size, _HEAD_SIZE)
    keys, values = (torch.randn(shape, device=kernels.device, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(sum(query_lens), _HEADS, _HEAD_SIZE, device=kernels.device, dtype=torch.bfloat16)
    batch = _batch(query_lens, contexts, torch.randperm(num_blocks).view(len(contexts), -1), kernels.device)
    seen = sum(count * context - count * (count - 1) // 2 for count, context in zip(query_lens, contexts, strict=True))
    return Case(
        f"attention, {len(contexts)} x {query_lens[0]} queries over {contexts[0]}",
        lambda: kernels.paged_attention(query, keys, values, batch, scale=_HEAD_SIZE**-0.5),
        keys.nbytes + values.nbytes + 2 * query.nbytes,
        4 * seen * _HEADS * _HEAD_SIZE,
    )


def _batch(query_lens: list[int], contexts: list[int], tables: Tensor, device: torch.device) -> AttentionBatch:
    import torch

    from quire.kernels.interface import AttentionBatch

    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)
    unused = torch.zeros(sum(query_lens), dtype=torch.int64, device=device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    return AttentionBatch(starts, lengths, tables.int().to(device), unused, unused, max(query_lens), max(contexts))


def _small(kernels: TritonKernels) -> Iterator[Case]:
    import torch

    for num_rows in (64, 4096):
        x = torch.randn(num_rows, _HIDDEN, device=kernels.device, dtype=torch.bfloat16)
        weight = torch.randn(_HIDDEN, device=kernels.device, dtype=torch.bfloat16)
        residual = torch.randn_like(x)
        call = lambda x=x, residual=residual, weight=weight: kernels.add_rms_norm(x, residual, weight, 1e-6)  # noqa: E731
        yield Case(f"sum and RMS norm, {num_rows} rows", call, 4 * x.nbytes)
        heads = x.view(num_rows, -1, _HEAD_SIZE)
        positions = torch.arange(num_rows, device=kernels.device)
        table = torch.randn(num_rows, 2, _HEAD_SIZE // 2, device=kernels.device)
        rotate = lambda heads=heads, positions=positions, table=table: kernels.rope(heads, positions, table)  # noqa: E731
        yield Case(f"RoPE, {num_rows} tokens of {_HEADS} heads", rotate, 2 * x.nbytes)


def _sampling(kernels: TritonKernels) -> Iterator[Case]:
    import torch

    from quire.kernels.sampling import Filters, Keys, ScaledRows
    from quire.kernels.triton.sampling import TritonSampling

    sampler, device = TritonSampling(), kernels.device
    for num_rows in (1, 64):
        logits = torch.randn(num_rows, _VOCABULARY, device=device) * 4
        ids = torch.arange(num_rows, device=device)
        rows = ScaledRows(ids, logits.max(dim=1).values, torch.ones(num_rows, device=device))
        half = torch.full((num_rows,), 0.9, dtype=torch.float64, device=device)
        filters = Filters(torch.full_like(ids, 50), half, torch.full((num_rows,), -torch.inf, device=device))
        yield Case(f"peaks, {num_rows} rows", lambda logits=logits: sampler.peaks(logits), logits.nbytes)  # type: ignore[misc]
        cut = lambda logits=logits, rows=rows, filters=filters: sampler.cuts(logits, rows, filters)  # noqa: E731
        yield Case(f"top-k and top-p, {num_rows} rows", cut, logits.nbytes)
        draw = lambda logits=logits, rows=rows, ids=ids: sampler.draw(logits, rows, None, Keys(ids, ids))  # noqa: E731
        yield Case(f"draw, {num_rows} rows", draw, logits.nbytes)
