"""Tile sizes for one kind of GPU, measured: `quire bench kernels --device cuda --tune FOLDER`
writes the file.

Owns the candidates, what each is tried on, and the choice: the least geometric mean of times.
Engines never search: they read the files (`quire.kernels.triton.tuning`), as the figures decide the
order of sums and so the bits.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from quire.bench.gpu_kernels import (
    Case,
    attention_case,
    fp8_case,
    integer_cases,
    linear_case,
    median_s,
)
from quire.kernels.triton.kernels import TritonKernels
from quire.kernels.triton.tuning import AttentionTuning, LinearTuning, Tile, Tuning

logger = logging.getLogger(__name__)

Figures = LinearTuning | AttentionTuning
Cost = Callable[[TritonKernels, str], float]
"""The mean seconds of kernels with a tuning, for one of its entries;
infinite where the device cannot run them."""

_ROWS = (1, 32, 512, 4096)
_LIBRARY_ROWS = (64, 128, 256, 512, 1024, 2048, 4096)

# Tiles that fill a matrix instruction of 9.0 (64 rows) or less, as far as registers and shared
# memory can hold them.
_LINEAR = tuple(
    LinearTuning(block_m, block_n, block_k, num_warps, num_stages, 128)
    for (block_m, num_warps), block_n, (block_k, num_stages) in itertools.product(
        ((32, 4), (64, 4), (128, 8)), (64, 128), ((64, 4), (128, 3))
    )
)
_WIDE_LINEAR = tuple(
    LinearTuning(32, block_n, 32, num_warps, 3, 128)
    for block_n, num_warps in ((32, 4), (64, 4), (64, 8))
)
_INTEGER = tuple(
    LinearTuning(block_m, block_n, 128, num_warps, num_stages, 128)
    for (block_m, num_warps), block_n, num_stages in itertools.product(
        ((32, 4), (64, 4), (64, 8)), (64, 128), (3, 4)
    )
)
_LOW, _TALL = Tile(64, 4), Tile(128, 8)
_ATTENTION = tuple(
    AttentionTuning(low, tall, block_n, split_len, num_stages)
    for (low, tall), block_n, split_len, num_stages in itertools.product(
        ((_LOW, _TALL), (_LOW, _LOW), (Tile(16, 4), Tile(16, 4))),
        (32, 64),
        (512, 1024, 2048),
        (2, 3),
    )
)
_WIDE_ATTENTION = tuple(
    AttentionTuning(low, tall, 32, 1024, 2)
    for low, tall in (
        (Tile(16, 4), Tile(16, 4)),
        (Tile(32, 4), Tile(32, 4)),
        (Tile(64, 8), Tile(64, 8)),
        (_LOW, _TALL),
    )
)
_FLOAT_ATTENTION = tuple(
    AttentionTuning(Tile(16, 4), Tile(16, 4), block_n, 1024, 2) for block_n in (16, 32)
)
CANDIDATES: dict[str, Sequence[Figures]] = {
    "linear": _LINEAR,
    "wide_linear": _WIDE_LINEAR,
    "integer": _INTEGER,
    "attention": _ATTENTION,
    "wide_attention": _WIDE_ATTENTION,
    "float_attention": _FLOAT_ATTENTION,
}


def tune(base: Tuning, device: torch.device, cost: Cost) -> Tuning:
    """`base` with the best candidate of each entry; the entry's own figures are a candidate too,
    and win a tie."""
    for entry, candidates in CANDIDATES.items():
        best, least = getattr(base, entry), math.inf
        for candidate in (best, *candidates):
            found = cost(TritonKernels(device, replace(base, **{entry: candidate})), entry)
            logger.info("%s %s: %.1f us", entry, candidate, found * 1e6)
            if found < least:
                best, least = candidate, found
        base = replace(base, **{entry: best})
    return base


def mean_seconds(kernels: TritonKernels, entry: str) -> float:
    """Return the geometric mean over an entry's cases;
    infinite where a tile needs more than the device has."""
    from triton.runtime.errors import OutOfResources

    try:
        times = [median_s(case.call, kernels.device) for case in _cases(kernels, entry)]
    except OutOfResources:
        return math.inf
    return math.exp(sum(map(math.log, times)) / len(times))


def _cases(kernels: TritonKernels, entry: str) -> Iterator[Case]:
    if entry.endswith("linear"):
        for num_rows in _ROWS:
            yield linear_case(kernels, num_rows, "bfloat16" if entry == "linear" else "float32")
    elif entry == "integer":
        for num_rows in _ROWS:
            yield from integer_cases(kernels, num_rows)
    else:
        options: dict[str, Any] = {"attention": {}, "wide_attention": {"head_size": 256}}.get(
            entry, {"kv_format": "float32"}
        )
        for count, query_len, context in ((1, 1, 8192), (64, 1, 2048), (1, 1024, 4096)):
            yield attention_case(kernels, [query_len] * count, [context] * count, **options)


def library_rows(kernels: TritonKernels, make: Callable[[TritonKernels, int], Case]) -> int | None:
    """Return the least number of rows from which torch's product is the faster one,
    however many more there are; None for none."""
    least = None
    for num_rows in reversed(_LIBRARY_ROWS):
        case = make(kernels, num_rows)
        assert case.torch_call is not None
        if median_s(case.torch_call, kernels.device) >= median_s(case.call, kernels.device):
            break
        least = num_rows
    return least


def tune_device(base: Tuning, device: torch.device) -> Tuning:
    """Return all figures for the device at hand: some minutes, most of them in the compiler."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    base = replace(base, num_programs=properties.multi_processor_count)
    found = tune(base, device, mean_seconds)
    kernels = TritonKernels(device, found)
    has_fp8 = kernels.options.has_fp8
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    return replace(
        found,
        source=f"measured by `quire bench kernels --tune` on {properties.name}, {versions}",
        min_library_rows=library_rows(kernels, linear_case),
        min_scaled_rows=library_rows(kernels, fp8_case) if has_fp8 else None,
    )


def names_of(figures: Figures) -> str:
    """`block_m=64, ...` for people."""
    return ", ".join(f"{each.name}={getattr(figures, each.name)}" for each in fields(figures))
