"""Fixtures and builders for kernel tests: instruction sets and thread counts forced in turn,
ragged paged batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu, load
from quire.kernels.interface import AttentionBatch, Kernels
from quire.kernels.kv_cache import empty_cache

HAS_NATIVE = cpu.IMPORT_ERROR is None
ISAS = cpu.supported_isas() if HAS_NATIVE else ("missing",)
EMULATED = cpu.emulated_isas() if HAS_NATIVE else ()
"""Differ from the others in their projections alone."""


@pytest.fixture
def reference() -> Kernels:
    return load("reference")


@pytest.fixture
def native() -> Kernels:
    """The native back end with its default instruction set."""
    if not HAS_NATIVE:
        pytest.skip(f"no native kernels: {cpu.IMPORT_ERROR}")
    return load("cpu")


@pytest.fixture(params=ISAS)
def native_isa(request: pytest.FixtureRequest, native: Kernels) -> Iterator[Kernels]:
    """The native back end under each instruction set that this machine has."""
    yield from _under(request.param, native)


@pytest.fixture(params=(*ISAS, *EMULATED))
def native_projections(request: pytest.FixtureRequest, native: Kernels) -> Iterator[Kernels]:
    """Also under those that it can only act out."""
    yield from _under(request.param, native)


def _under(isa: str, native: Kernels) -> Iterator[Kernels]:
    with cpu.using(isa=isa):
        yield native


@pytest.fixture
def restore_threads(native: Kernels) -> Iterator[None]:
    """The number of threads is given back after the test."""
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


@dataclass(frozen=True)
class Paged:
    """Keys and values of some sequences, and the same in a paged cache of any block size."""

    lens: tuple[tuple[int, int], ...]
    """(query length, context length) of each sequence."""
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    """[context, KV heads, D] each."""

    @classmethod
    def random(
        cls,
        lens: Sequence[tuple[int, int]],
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> Paged:
        generator = torch.Generator().manual_seed(len(lens) * 1000 + head_size)

        def draw(context: int) -> Tensor:
            return torch.randn(context, num_kv_heads, head_size, generator=generator).to(dtype)

        return cls(tuple(lens), tuple(draw(c) for _, c in lens), tuple(draw(c) for _, c in lens))

    def pages(
        self, block_size: int, kv_format: str | None = None
    ) -> tuple[Tensor, Tensor, AttentionBatch]:
        """Key cache, value cache and batch. Blocks are scattered; whatever no sequence owns is not
        a number.

        `kv_format` is that of the keys unless given; the reference writes the rows, which its own
        tests hold to.
        """
        counts = [-(-context // block_size) for _, context in self.lens]
        num_kv_heads, head_size = self.keys[0].shape[1:]
        total = sum(counts) + 3
        order = torch.randperm(total, generator=torch.Generator().manual_seed(7))
        form = str(self.keys[0].dtype).removeprefix("torch.") if kv_format is None else kv_format
        caches = [empty_cache(total, num_kv_heads, block_size, head_size, form) for _ in range(2)]
        for cache in caches:
            cache.view(torch.uint8).fill_(0xFF)  # not a number in every floating format
        tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for index, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            tables[index, :count] = order[end - count : end]
            positions = torch.arange(self.keys[index].shape[0])
            slots = (
                tables[index, positions // block_size].long() * block_size + positions % block_size
            )
            load("reference").write_kv(
                self.keys[index], self.values[index], caches[0], caches[1], slots
            )
        return caches[0], caches[1], self.batch(tables)

    def give_back(self, window: int, caches: tuple[Tensor, Tensor], batch: AttentionBatch) -> None:
        """Put what is not a number behind the windows of each sequence's queries, and -1 in place
        of blocks of which nothing is left."""
        block_size = caches[0].shape[2]
        for (num_queries, context), table in zip(self.lens, batch.block_tables, strict=True):
            first = max(0, context - num_queries - window + 1)
            for position in range(first):
                block, offset = int(table[position // block_size]), position % block_size
                for cache in caches:
                    cache[block, :, offset].view(torch.uint8).fill_(0xFF)
            table[: first // block_size] = -1

    def batch(self, tables: Tensor) -> AttentionBatch:
        query_lens, contexts = [q for q, _ in self.lens], [c for _, c in self.lens]
        positions = torch.cat([torch.arange(c - q, c) for q, c in self.lens])
        return AttentionBatch(
            query_start=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
            context_len=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            slots=torch.zeros_like(positions),
            positions=positions,
            max_query_len=max(query_lens),
            max_context_len=max(contexts),
        )


@pytest.fixture
def paged() -> type[Paged]:
    return Paged
