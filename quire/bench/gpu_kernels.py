"""The GPU's kernels against what the GPU can do, and against torch's:
`quire bench kernels --device cuda`.

Owns the cases (projections, attention, experts, the small kernels and sampling, with the shapes of
an 8-billion-parameter model), their timing, and the two limits that they are compared with,
measured in the same run: bytes per second of a large copy, and operations per second of torch's own
matrix product. Before each timed call a buffer larger than the L2 is written, as in a real step the
weights come from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from quire.engine.plan.attention import MODULES, AttentionNeeds, module_for, reasons_against

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.kernels.interface import AttentionBatch
    from quire.kernels.triton.kernels import TritonKernels
    from quire.kernels.triton.library_attention import LibraryAttention

_FLUSH_BYTES = 256 << 20
"""More than any GPU's L2."""
_COPY_BYTES = 2 << 30
_MATRIX_SIZE = 8192
_NUM_WARM_UPS, _NUM_TRIES = 3, 20
_HEAD_START_CYCLES = 2_000_000
"""The device waits about a millisecond before each timed call,
so that the host's launching is not what is timed."""
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
    torch_call: Callable[[], object] | None = None
    """The nearest that torch has, or for attention a library that is installed."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The median of several calls."""

    name: str
    seconds: float
    bytes_per_s: float
    ops_per_s: float
    roofline_share: float
    """The least time that the bytes or the operations need, over the time taken."""
    torch_seconds: float | None = None


def measure_limits(device: torch.device) -> GpuLimits:
    """Takes about a second."""
    import torch

    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    a, b = (
        torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    matrix_s = median_s(lambda: torch.mm(a, b), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return GpuLimits(name, 2 * _COPY_BYTES / copy_s, 2 * _MATRIX_SIZE**3 / matrix_s)


def median_s(call: Callable[[], object], device: torch.device) -> float:
    """Return seconds on the device's own clock, with a cold L2."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(_NUM_WARM_UPS):
        call()
    times: list[float] = []
    for _ in range(_NUM_TRIES):
        flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # has no public name
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def cases(kernels: TritonKernels) -> Iterator[Case]:
    """Yield the cases one after another, so that one case's tensors are in memory at a time."""
    for num_rows in (1, 16, 64, 512, 4096):
        yield linear_case(kernels, num_rows)
        yield from integer_cases(kernels, num_rows)
        yield fp8_case(kernels, num_rows)
    for num_sequences, context in ((1, 4096), (64, 1024), (64, 4096), (64, 8192), (1, 131_072)):
        yield attention_case(kernels, [1] * num_sequences, [context] * num_sequences)
    for kv_format in ("int8", "fp8"):
        yield attention_case(kernels, [1] * 64, [8192] * 64, kv_format=kv_format)
    for query_len, context in ((2048, 2048), (8192, 8192), (512, 8192)):
        yield attention_case(kernels, [query_len], [context])
    for num_tokens in (1, 64, 2048):
        yield _experts(kernels, num_tokens)
    yield from _small(kernels)
    yield from _sampling(kernels)


def measure(case: Case, limits: GpuLimits, device: torch.device) -> KernelTime:
    """Time one case."""
    seconds = median_s(case.call, device)
    least = max(case.num_bytes / limits.copy_bytes_per_s, case.num_ops / limits.matrix_ops_per_s)
    torch_seconds = None if case.torch_call is None else median_s(case.torch_call, device)
    return KernelTime(
        case.name,
        seconds,
        case.num_bytes / seconds,
        case.num_ops / seconds,
        least / seconds,
        torch_seconds,
    )


def render(limits: GpuLimits, times: Sequence[KernelTime]) -> Iterator[str]:
    """Yield a table in Markdown, line by line."""
    rates = (
        f"copies {limits.copy_bytes_per_s / 1e9:.0f} GB/s, bfloat16 "
        f"{limits.matrix_ops_per_s / 1e12:.0f} TFLOP/s"
    )
    yield f"{limits.name}: {rates}"
    yield ""
    yield "| kernel | time (us) | torch or library (us) | GB/s | TFLOP/s | of the nearer limit |"
    yield "|---|---:|---:|---:|---:|---:|"
    for each in times:
        torch_us = "" if each.torch_seconds is None else f"{each.torch_seconds * 1e6:.1f}"
        yield (
            f"| {each.name} | {each.seconds * 1e6:.1f} | {torch_us} | {each.bytes_per_s / 1e9:.0f} "
            f"| {each.ops_per_s / 1e12:.1f} | {each.roofline_share:.0%} |"
        )


def linear_case(kernels: TritonKernels, num_rows: int, dtype: str = "bfloat16") -> Case:
    """Return a square projection."""
    import torch

    chosen = getattr(torch, dtype)
    weight = torch.randn(_HIDDEN, _HIDDEN, device=kernels.device, dtype=chosen)
    packed = kernels.pack_linear(weight)
    x = torch.randn(num_rows, _HIDDEN, device=kernels.device, dtype=chosen)
    ops, num_bytes = 2 * num_rows * _HIDDEN * _HIDDEN, weight.nbytes + 2 * x.nbytes
    name = f"linear {dtype}, {num_rows} rows"
    return Case(
        name, lambda: kernels.linear(x, packed), num_bytes, ops, lambda: torch.mm(x, weight.t())
    )


def fp8_case(kernels: TritonKernels, num_rows: int) -> Case:
    """Return a square projection of e4m3 numbers, one scale per output, inputs quantized on the
    way; torch's with its own scales."""
    import torch

    from quire.kernels.interface import QuantizedWeight

    values = torch.randn(_HIDDEN, _HIDDEN, device=kernels.device).to(torch.float8_e4m3fn)
    packed = kernels.pack_quantized(
        QuantizedWeight(values, torch.ones(_HIDDEN, 1), None, 8, _HIDDEN, "fp8")
    )
    x = torch.randn(num_rows, _HIDDEN, device=kernels.device, dtype=torch.bfloat16)
    narrow, one = x.to(torch.float8_e4m3fn), torch.ones((), device=kernels.device)
    theirs = lambda: torch._scaled_mm(  # noqa: E731
        narrow, values.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
    )
    name, ops = f"linear fp8, {num_rows} rows", 2 * num_rows * _HIDDEN * _HIDDEN
    return Case(name, lambda: kernels.linear(x, packed), values.nbytes + 2 * x.nbytes, ops, theirs)


def integer_cases(kernels: TritonKernels, num_rows: int) -> Iterator[Case]:
    """Yield a square projection of integers in three forms."""
    import torch

    from quire.kernels.interface import QuantizedWeight

    x = torch.randn(num_rows, _HIDDEN, device=kernels.device, dtype=torch.bfloat16)
    ops = 2 * num_rows * _HIDDEN * _HIDDEN
    for bits, group, activations in ((8, _HIDDEN, "int8"), (4, 128, "int8"), (4, 128, "float")):
        values = torch.randint(-7, 8, (_HIDDEN, _HIDDEN), dtype=torch.int8)
        scales = torch.rand(_HIDDEN, _HIDDEN // group)
        packed = kernels.pack_quantized(
            QuantizedWeight(values, scales, None, bits, group, activations)  # type: ignore[arg-type]
        )
        name = f"linear int{bits} in groups of {group}, {activations} inputs, {num_rows} rows"
        yield Case(
            name,
            lambda packed=packed: kernels.linear(x, packed),  # type: ignore[misc]
            packed.num_bytes + 2 * x.nbytes,
            ops,
        )


def attention_case(
    kernels: TritonKernels,
    query_lens: list[int],
    contexts: list[int],
    *,
    head_size: int = _HEAD_SIZE,
    kv_format: str = "bfloat16",
) -> Case:
    """Return the case of as many queries against as many positions of each sequence, in blocks of
    16; queries are float32 where the cache is."""
    import torch

    from quire.kernels.kv_cache import empty_cache

    block_size, dtype = 16, torch.float32 if kv_format == "float32" else torch.bfloat16
    num_blocks = sum(math.ceil(context / block_size) for context in contexts)
    keys, values = (
        empty_cache(num_blocks, _KV_HEADS, block_size, head_size, kv_format, kernels.device)
        for _ in range(2)
    )
    rows = torch.randn(
        block_size * num_blocks, _KV_HEADS, head_size, device=kernels.device, dtype=dtype
    )
    kernels.write_kv(rows, rows, keys, values, torch.arange(len(rows), device=kernels.device))
    query = torch.randn(sum(query_lens), _HEADS, head_size, device=kernels.device, dtype=dtype)
    batch = _batch(
        query_lens, contexts, torch.randperm(num_blocks).view(len(contexts), -1), kernels.device
    )
    library = _library(kernels, kv_format)
    theirs = None
    if library is not None:
        theirs = partial(
            library, query, (keys, values), batch, scale=head_size**-0.5, window=None, soft_cap=None
        )
    seen = sum(
        count * context - count * (count - 1) // 2
        for count, context in zip(query_lens, contexts, strict=True)
    )
    return Case(
        f"attention {kv_format}, {len(contexts)} x {query_lens[0]} queries over "
        f"{contexts[0]}, heads of {head_size}",
        lambda: kernels.paged_attention(query, keys, values, batch, scale=head_size**-0.5),
        keys.nbytes + values.nbytes + 2 * query.nbytes,
        4 * seen * _HEADS * head_size,
        theirs,
    )


def _library(kernels: TritonKernels, kv_format: str) -> LibraryAttention | None:
    """FlashInfer or FlashAttention 3, whichever is installed and fits the device;
    version 2 has no blocks of 16."""
    from quire.kernels.triton.library_attention import load_attention

    if kernels.device.type != "cuda" or kv_format != "bfloat16":
        return None
    needs = AttentionNeeds(
        "bfloat16",
        "bfloat16",
        16,
        frozenset({_HEAD_SIZE}),
        _capability(kernels.device),
        is_invariant=False,
    )
    for name in MODULES:
        module = module_for(name, needs)
        if module is not None and not reasons_against(name, needs):
            return load_attention(module, kernels.device)
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device)


def _batch(
    query_lens: list[int], contexts: list[int], tables: Tensor, device: torch.device
) -> AttentionBatch:
    import torch

    from quire.kernels.interface import AttentionBatch

    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)
    unused = torch.zeros(sum(query_lens), dtype=torch.int64, device=device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    return AttentionBatch(
        starts, lengths, tables.int().to(device), unused, unused, max(query_lens), max(contexts)
    )


def _experts(kernels: TritonKernels, num_tokens: int) -> Case:
    """Return a layer of 64 experts, 6 for a token, as small as in the finest mixtures.
    Bytes are those of the experts that occur."""
    import torch

    from quire.program.operations import Routing

    num_experts, count, hidden, inner = 64, 6, 2048, 1408
    shapes = ((num_experts * 2 * inner, hidden), (num_experts * hidden, inner))
    up, down = (
        kernels.pack_linear(torch.randn(shape, device=kernels.device, dtype=torch.bfloat16))
        for shape in shapes
    )
    logits = torch.randn(num_tokens, num_experts, device=kernels.device)
    choice = kernels.choose_experts(logits, Routing(num_experts, count, is_normalised=True))
    x = torch.randn(num_tokens, hidden, device=kernels.device, dtype=torch.bfloat16)
    share = choice.ids.unique().numel() / num_experts  # type: ignore[no-untyped-call]
    return Case(
        f"experts, {num_tokens} tokens",
        lambda: kernels.apply_experts(x, up, down, choice, "silu"),
        int((up.num_bytes + down.num_bytes) * share) + 2 * x.nbytes,
        2 * num_tokens * count * 3 * hidden * inner,
    )


def _small(kernels: TritonKernels) -> Iterator[Case]:
    import torch

    for num_rows in (64, 4096):
        x = torch.randn(num_rows, _HIDDEN, device=kernels.device, dtype=torch.bfloat16)
        weight = torch.randn(_HIDDEN, device=kernels.device, dtype=torch.bfloat16)
        residual = torch.randn_like(x)
        call = lambda x=x, residual=residual, weight=weight: kernels.add_rms_norm(  # noqa: E731
            x, residual, weight, 1e-6
        )
        theirs = lambda x=x, residual=residual, weight=weight: torch.rms_norm(  # noqa: E731
            x + residual, weight.shape, weight, 1e-6
        )
        yield Case(f"sum and RMS norm, {num_rows} rows", call, 4 * x.nbytes, 0, theirs)
        heads = x.view(num_rows, -1, _HEAD_SIZE)
        positions = torch.arange(num_rows, device=kernels.device)
        table = torch.randn(num_rows, 2, _HEAD_SIZE // 2, device=kernels.device)
        rotate = lambda heads=heads, positions=positions, table=table: kernels.rope(  # noqa: E731
            heads, positions, table
        )
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
        filters = Filters(
            torch.full_like(ids, 50), half, torch.full((num_rows,), -torch.inf, device=device)
        )
        argmax = partial(sampler.argmax, logits)
        yield Case(f"argmax, {num_rows} rows", argmax, logits.nbytes)
        search = partial(sampler.thresholds, logits, rows, filters)
        order = lambda logits=logits: torch.sort(logits, descending=True)  # noqa: E731
        yield Case(
            f"top-k and top-p, {num_rows} rows (torch: a sort alone)",
            search,
            logits.nbytes,
            0,
            order,
        )
        draw = lambda logits=logits, rows=rows, ids=ids: sampler.draw(  # noqa: E731
            logits, rows, None, Keys(ids, ids)
        )
        yield Case(f"draw, {num_rows} rows", draw, logits.nbytes)
