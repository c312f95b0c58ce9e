"""Paged attention alone: prefill against the machine's rate of operations, decoding against its
read bandwidth.

    python -m benchmarks.attention [--kv bfloat16 float32 int8 fp8] [--threads 2]

Shapes are those of well-known models' layers; keys and values are random, blocks scattered over the
pool. Each figure is the mean of several calls of `paged_attention`, so it holds everything that a
layer spends on attention but the cache write. Operations count the causal half only (what must be
computed), bytes the keys and values that must be read, once where sequences share blocks. The
limits are sampled right before and right after each case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.bench.limits import limit_sampler, typical
from quire.kernels import cpu, load
from quire.kernels.interface import AttentionBatch, Kernels
from quire.kernels.kv_cache import empty_cache

BLOCK_SIZE = 16


class Shape(NamedTuple):
    """Heads of one layer. With a value size it is latent attention: a token has one row, which all
    heads take their keys from, and the values from its beginning."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int = 0

    @property
    def num_products(self) -> int:
        """Multiply-adds of a head for one query and one key."""
        return self.head_size + (self.value_size or self.head_size)


class Case(NamedTuple):
    """A batch: query tokens and context of each sequence;
    of so many in a row the first tokens are in the same blocks."""

    name: str
    lens: tuple[tuple[int, int], ...]
    family: int = 1
    num_shared: int = 0


SHAPES = (
    Shape("Qwen3-0.6B", 16, 8, 128),
    Shape("SmolLM2-135M", 9, 3, 64),
    Shape("Llama-3.2-1B", 32, 8, 64),
    Shape("DeepSeek-V2-Lite", 16, 1, 576, 512),
    Shape("DeepSeek-V3", 128, 1, 576, 512),
)
PREFILLS = (
    Case("prefill 4096", ((4096, 4096),)),
    Case("prefill 2048..4096", ((2048, 4096),)),
    Case("prefill 512", ((512, 512),)),
)
DECODES = (
    Case("decode 1 x 8k", ((1, 8192),)),
    Case("decode 1 x 32k", ((1, 32768),)),
    Case("decode 8 x 1k", ((1, 1024),) * 8),
    Case("decode 64 x 300", ((1, 300),) * 64),
    Case("8 share 256", ((1, 300),) * 64, 8, 256),
    Case("decode 64 x 1.1k", ((1, 1100),) * 64),
    Case("64 share 1024", ((1, 1100),) * 64, 64, 1024),
)


def draw(
    shape: Shape, case: Case, kv: str, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """Return a query and a filled cache."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-context // BLOCK_SIZE) for _, context in case.lens]
    order = torch.randperm(sum(counts), generator=generator).int()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(torch.split(order, counts)):
        tables[row, : len(blocks)] = blocks
        shared = case.num_shared // BLOCK_SIZE
        tables[row, :shared] = tables[row // case.family * case.family, :shared]
    caches = [
        empty_cache(sum(counts), shape.num_kv_heads, BLOCK_SIZE, shape.head_size, kv)
        for _ in range(1 if shape.value_size else 2)
    ]
    slots = torch.arange(sum(counts) * BLOCK_SIZE)
    rows = torch.randn(
        2, len(slots), shape.num_kv_heads, shape.head_size, generator=generator
    ).bfloat16()
    kernels.write_kv(rows[0], rows[-1], caches[0], caches[-1], slots)
    query_lens = torch.tensor([q for q, _ in case.lens])
    query = torch.randn(
        int(query_lens.sum()), shape.num_heads, shape.head_size, generator=generator
    ).bfloat16()
    none = torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch(
        query_start=torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int(),
        context_len=torch.tensor([c for _, c in case.lens], dtype=torch.int32),
        block_tables=tables,
        slots=none,
        positions=none,
        max_query_len=int(query_lens.max()),
        max_context_len=max(c for _, c in case.lens),
    )
    return query, caches[0], caches[-1], batch


def mean_s(work: Callable[[], object], budget_s: float = 0.4) -> float:
    """Return the mean time of at least three calls after a first one."""
    work()
    calls, started = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - started < budget_s:
        work()
        calls += 1
    return (time.perf_counter() - started) / calls


def measure(shape: Shape, case: Case, kv: str, kernels: Kernels) -> tuple[float, int, int]:
    """Seconds, operations and bytes of one call."""
    query, keys, values, batch = draw(shape, case, kv, kernels)
    value_size = shape.value_size or None
    seconds = mean_s(
        lambda: kernels.paged_attention(
            query, keys, values, batch, scale=shape.head_size**-0.5, value_size=value_size
        )
    )
    pairs = sum(q * c - q * (q - 1) // 2 for q, c in case.lens)
    num_read = (
        sum(c for _, c in case.lens)
        - (len(case.lens) - len(case.lens) // case.family) * case.num_shared
    )
    stored = keys.nbytes + (0 if values is keys else values.nbytes)
    num_bytes = stored // keys.shape[0] // BLOCK_SIZE * num_read
    return seconds, 2 * pairs * shape.num_heads * shape.num_products, num_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line a shape and case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kv", nargs="+", default=["bfloat16"], help="formats of the KV cache")
    parser.add_argument("--shapes", nargs="+", choices=[each.name for each in SHAPES])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    cpu.set_num_threads(options.threads)
    sampler, kernels = limit_sampler(), load("cpu")
    samples = [sampler.sample()]
    print(
        f"{'shape':14} {'KV':9} {'case':20} {'ms':>9} {'GFLOP/s':>9} {'of GEMM':>8} "
        f"{'GB/s':>7} {'of read':>8}"
    )
    for kv in options.kv:
        for shape in (each for each in SHAPES if each.name in (options.shapes or each.name)):
            for case in (*PREFILLS, *DECODES):
                seconds, flops, num_bytes = measure(shape, case, kv, kernels)
                samples.append(sampler.sample())
                peaks = typical(samples[-2:])
                rate, bandwidth = flops / seconds, num_bytes / seconds
                print(
                    f"{shape.name:14} {kv:9} {case.name:20} {seconds * 1e3:9.3f} {rate / 1e9:9.1f} "
                    f"{rate / peaks.best_gemm:8.0%} {bandwidth / 1e9:7.1f} "
                    f"{bandwidth / peaks.read_bytes_per_s:8.0%}"
                )
    peaks = typical(samples)
    print(
        f"limits: {peaks.best_gemm / 1e9:.0f} GFLOP/s (best GEMM), "
        f"{peaks.read_bytes_per_s / 1e9:.1f} GB/s"
    )


if __name__ == "__main__":
    main()
