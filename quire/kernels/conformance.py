"""What kernels must be able to do, as checks: each operation against its reference, and the rules
of exactness, to the bit.

For the authors of other back ends (`quire plugin check`). A check yields a verdict for each thing
that it looks at; none of them raises for wrong kernels. Inputs are drawn from fixed seeds, with
shapes that no tile divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, Kernels, QuantizedWeight
from quire.kernels.kv_cache import empty_cache
from quire.kernels.reference import ReferenceKernels

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of a result, relative to the largest one of the reference."""
_ROWS, _INPUTS, _OUTPUTS, _HEADS, _KV_HEADS, _HEAD_DIM = 11, 96, 70, 6, 2, 16
_LENS = ((5, 23), (1, 17), (9, 9), (1, 40))
"""Query tokens and context of the sequences of a batch."""


class Verdict(NamedTuple):
    """One thing looked at."""

    name: str
    problem: str | None
    """None where it is right."""


class _Bench(NamedTuple):
    """The kernels that are checked, and what they are held to."""

    kernels: Kernels
    dtype: torch.dtype
    reference: ReferenceKernels

    def draw(self, *shape: int, seed: int = 0) -> Tensor:
        """Return numbers, on the CPU."""
        generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
        return torch.randn(*shape, generator=generator).to(self.dtype)

    def at(self, tensor: Tensor) -> Tensor:
        """Return a copy where the kernels compute."""
        return tensor.clone().to(self.kernels.device)


def check_kernels(kernels: Kernels) -> Iterator[Verdict]:
    """Check kernels in float32 and bfloat16."""
    for dtype in TOLERANCES:
        bench = _Bench(kernels, dtype, ReferenceKernels())
        for check in (_rows, _products, _tables, _cache, _attention):
            try:
                for verdict in check(bench):
                    name = f"{str(dtype).removeprefix('torch.')}: {verdict.name}"
                    yield verdict._replace(name=name)
            except Exception as error:
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                yield Verdict(f"{str(dtype).removeprefix('torch.')}: {check.__name__[1:]}", text)


# -- rows of numbers
# --------------------------------------------------------------------------------------------------


def _rows(bench: _Bench) -> Iterator[Verdict]:
    """Operations on rows: each gives the reference's numbers, and each row its own bits."""
    kernels, reference = bench.kernels, bench.reference
    x, weight, bias = (bench.draw(*shape) for shape in ((_ROWS, _INPUTS), (_INPUTS,), (_INPUTS,)))
    wide = bench.draw(_ROWS, 2 * _INPUTS)

    def add_rms(of: Kernels, rows: Tensor) -> Tensor:
        normed, total = of.add_rms_norm(rows, rows.flip(-1), at(of, weight), 1e-5)
        return torch.cat((normed, total), -1)

    def at(of: Kernels, tensor: Tensor) -> Tensor:
        return tensor.to(of.device)

    cases: dict[str, tuple[Callable[[Kernels, Tensor], Tensor], Tensor]] = {
        "rms_norm": (lambda of, rows: of.rms_norm(rows, at(of, weight), 1e-5), x),
        "add_rms_norm": (add_rms, x),
        "layer_norm": (
            lambda of, rows: of.layer_norm(rows, at(of, weight), at(of, bias), 1e-5),
            x,
        ),
        "activate": (lambda of, rows: of.activate(rows, "gelu_tanh"), x),
        "gated": (lambda of, rows: of.gated(rows, "silu"), wide),
        "finite_rows": (lambda of, rows: of.finite_rows(rows).float()[:, None], x),
    }
    for name, (run, rows) in cases.items():
        yield from _held(bench, name, run, rows)
    broken = x.clone()
    broken[3, 5] = torch.nan
    found = kernels.finite_rows(bench.at(broken)).cpu()
    right = torch.equal(found, reference.finite_rows(broken))
    is_known = not kernels.is_finite(bench.at(broken)) and kernels.is_finite(bench.at(x))
    yield Verdict("not-a-numbers are found", None if right and is_known else "a NaN is missed")
    yield from _rope(bench)


def _rope(bench: _Bench) -> Iterator[Verdict]:
    heads = bench.draw(_ROWS, _HEADS, _HEAD_DIM)
    angles = torch.arange(64)[:, None] / 10.0 ** torch.arange(_HEAD_DIM // 2)
    table = torch.stack((angles.cos(), angles.sin()), 1).float()
    for interleaved in (False, True):

        def run(of: Kernels, rows: Tensor, interleaved: bool = interleaved) -> Tensor:
            rotated = rows.clone()
            positions = torch.full((len(rows),), 37, device=of.device)
            of.rope(rotated, positions, table.to(of.device), interleaved=interleaved)
            return rotated

        yield from _held(bench, "rope, interleaved" if interleaved else "rope", run, heads)


def _products(bench: _Bench) -> Iterator[Verdict]:
    """Projections: a row's bits are its own, whatever is beside it."""
    x = bench.draw(_ROWS, _INPUTS)
    weight, bias = bench.draw(_OUTPUTS, _INPUTS, seed=1), bench.draw(_OUTPUTS, seed=2)
    values = (weight.float() * 30).round().clamp(-127, 127).to(torch.int8)
    scales = bench.draw(_OUTPUTS, 3, seed=3).float().abs() / 100

    def floats(of: Kernels, rows: Tensor) -> Tensor:
        packed = of.pack_linear(weight.to(of.device), bias.to(of.device))
        return of.linear(rows, packed, out_dtype="float32")

    def gated(of: Kernels, rows: Tensor) -> Tensor:
        packed = of.pack_linear(weight.to(of.device))
        return of.gated_linear(rows, packed, "silu")

    def integers(of: Kernels, rows: Tensor) -> Tensor:
        quantized = QuantizedWeight(
            values.to(of.device), scales.to(of.device), None, 8, _INPUTS // 3, "int8"
        )
        return of.linear(rows, of.pack_quantized(quantized), out_dtype="float32")

    for name, run in (("linear", floats), ("gated_linear", gated), ("linear, int8", integers)):
        yield from _held(bench, name, run, x)
    packed = bench.kernels.pack_linear(bench.at(torch.cat((weight, weight))))
    ids, values_found = bench.kernels.linear_argmax(bench.at(x), packed)
    logits = bench.kernels.linear(bench.at(x), packed, out_dtype="float32").cpu()
    expected = bench.reference.linear_argmax(x, bench.reference.pack_linear(
        torch.cat((weight, weight))))[0]  # fmt: skip
    is_right = bool((ids.cpu() < _OUTPUTS).all()) and torch.equal(
        values_found.cpu().float(), logits.max(-1).values
    )
    is_right = is_right and (bench.dtype != torch.float32 or torch.equal(ids.cpu(), expected))
    text = "it is not the lowest id of the largest output"
    yield Verdict("linear_argmax", None if is_right else text)


def _tables(bench: _Bench) -> Iterator[Verdict]:
    """Rows of a table, which are copied."""
    weight, ids = bench.draw(40, _INPUTS), torch.tensor([3, 39, 0, 3])
    packed = bench.kernels.pack_linear(bench.at(weight))
    table = bench.kernels.table_of(packed)
    if table is None:
        table = bench.at(weight)
    found = bench.kernels.embedding(ids.to(bench.kernels.device), table).cpu()
    yield Verdict("embedding", None if torch.equal(found, weight[ids]) else "rows are not copied")


# -- the cache
# --------------------------------------------------------------------------------------------------


def _cache(bench: _Bench) -> Iterator[Verdict]:
    """Rows of the cache have the reference's bytes, in every format, and blocks are copied."""
    keys, values = (bench.draw(_ROWS, _KV_HEADS, _HEAD_DIM, seed=seed) for seed in (4, 5))
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:_ROWS]
    for form in ("float32", "bfloat16", "int8", "fp8"):
        written = []
        for of in (bench.kernels, bench.reference):
            pair = [_empty(of, 5, 8, form) for _ in range(2)]
            of.write_kv(
                keys.to(of.device), values.to(of.device), pair[0], pair[1], slots.to(of.device)
            )
            written.append([each.cpu().view(torch.uint8) for each in pair])
        is_same = all(map(torch.equal, *written))
        yield Verdict(f"write_kv, {form}", None if is_same else "its bytes are others")
    cache = _empty(bench.kernels, 6, 8, "float32")
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(2)))
    before, device = cache.cpu(), bench.kernels.device
    sources, destinations = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 5])
    bench.kernels.copy_blocks([cache], sources.to(device), destinations.to(device))
    before[destinations] = before[sources]
    is_same = torch.equal(cache.cpu(), before)
    yield Verdict("copy_blocks", None if is_same else "blocks are not copied before they change")


def _empty(kernels: Kernels, num_blocks: int, block_size: int, form: str) -> Tensor:
    cache = empty_cache(num_blocks, _KV_HEADS, block_size, _HEAD_DIM, form, kernels.device)
    cache.view(torch.uint8).zero_()
    return cache


def _attention(bench: _Bench) -> Iterator[Verdict]:
    """Attention: the reference's numbers, and the same bits for a sequence alone, with blocks of
    another size in another order, and computed in pieces."""
    form = str(bench.dtype).removeprefix("torch.")
    for name, options in (("", {}), (", window", {"window": 7}), (", soft cap", {"soft_cap": 5.0})):
        whole = _attended(bench, bench.kernels, _LENS, 8, form, **options)
        expected = _attended(bench, bench.reference, _LENS, 8, form, **options)
        yield Verdict(f"paged_attention{name}", _distance(bench, whole, expected))
        again = _attended(bench, bench.kernels, _LENS, 16, form, **options)
        text = "the block size, or where blocks lie, changes bits"
        yield Verdict(f"attention{name}: blocks", None if torch.equal(whole, again) else text)
        ends = list(accumulate(count for count, _ in _LENS))
        alone = [
            _attended(bench, bench.kernels, (each,), 8, form, number, **options)
            for number, each in enumerate(_LENS)
        ]
        text = "other sequences of the batch change bits"
        is_same = torch.equal(whole, torch.cat(alone))
        yield Verdict(f"attention{name}: alone", None if is_same else text)
        last = _attended(bench, bench.kernels, ((2, _LENS[0][1]),), 8, form, **options)
        text = "a prompt computed in pieces has other bits"
        is_same = torch.equal(whole[ends[0] - 2 : ends[0]], last)
        yield Verdict(f"attention{name}: in pieces", None if is_same else text)


def _attended(
    bench: _Bench,
    of: Kernels,
    lens: tuple[tuple[int, int], ...],
    block_size: int,
    form: str,
    first: int = 0,
    **options: float,
) -> Tensor:
    """Attend with sequences of these lengths, which are those from number `first` on of the
    batch that all checks are about."""
    counts = [-(-context // block_size) for _, context in lens]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(block_size))
    pair = [_empty(of, len(order), block_size, form) for _ in range(2)]
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    queries = []
    for row, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        num_queries, context = lens[row]
        tables[row, :count] = order[end - count : end]
        at = torch.arange(context)
        slots = tables[row, at // block_size].long() * block_size + at % block_size
        keys, values = (
            bench.draw(context, _KV_HEADS, _HEAD_DIM, seed=10 * kind + first + row).to(of.device)
            for kind in (1, 2)
        )
        of.write_kv(keys, values, pair[0], pair[1], slots.to(of.device))
        drawn = bench.draw(context, _HEADS, _HEAD_DIM, seed=30 + first + row)
        queries.append(drawn[context - num_queries :])
    positions = torch.cat([torch.arange(context - count, context) for count, context in lens])
    starts = torch.tensor([0, *accumulate(count for count, _ in lens)], dtype=torch.int32)
    contexts = torch.tensor([context for _, context in lens], dtype=torch.int32)
    batch = AttentionBatch(
        query_start=starts.to(of.device),
        context_len=contexts.to(of.device),
        block_tables=tables.to(of.device),
        slots=torch.zeros_like(positions).to(of.device),
        positions=positions.to(of.device),
        max_query_len=max(count for count, _ in lens),
        max_context_len=max(context for _, context in lens),
    )
    query = torch.cat(queries).to(of.device)
    found = of.paged_attention(query, pair[0], pair[1], batch, scale=0.25, **options)  # type: ignore[arg-type]
    return found.cpu()


# -- how results are judged
# --------------------------------------------------------------------------------------------------


def _held(
    bench: _Bench, name: str, run: Callable[[Kernels, Tensor], Tensor], rows: Tensor
) -> Iterator[Verdict]:
    """Compare an operation on rows with the reference, with itself, and with each row alone."""
    found = run(bench.kernels, bench.at(rows)).cpu()
    yield Verdict(name, _distance(bench, found, run(bench.reference, rows.clone())))
    again = run(bench.kernels, bench.at(rows)).cpu()
    text = "a second call gives other bits"
    yield Verdict(f"{name}: twice", None if torch.equal(found, again) else text)
    alone = [run(bench.kernels, bench.at(rows[row : row + 1])).cpu() for row in range(len(rows))]
    text = "a row's bits depend on the rows beside it"
    yield Verdict(f"{name}: alone", None if torch.equal(found, torch.cat(alone)) else text)


def _distance(bench: _Bench, found: Tensor, expected: Tensor) -> str | None:
    """Say how far numbers are from the reference's, where that is too far."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"{found.dtype} {list(found.shape)} in place of {expected.dtype} {list(expected.shape)}"
        )
    error = (found.double() - expected.double()).abs().max()
    most = TOLERANCES[bench.dtype] * max(1.0, float(expected.double().abs().max()))
    return None if bool(error <= most) else f"off by {float(error):.3g}, {most:.3g} are allowed"
