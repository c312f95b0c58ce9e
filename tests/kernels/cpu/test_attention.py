"""Native paged attention and cache movement against the reference,
and the bits that nothing may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.interface import AttentionBatch, Kernels
from quire.kernels.kv_cache import empty_cache

if TYPE_CHECKING:
    from tests.kernels.conftest import Paged

SINKS = torch.tensor([0.5, 3.0, -90.0, 90.0, -1.0, 0.0])
"""Of each head: among its scores, and far from them on both sides."""
RAGGED = ((1, 1), (5, 5), (70, 100), (1, 1100), (33, 65), (1, 32), (2, 33))


def draw_query(paged: Paged, num_heads: int) -> Tensor:
    num_tokens = sum(count for count, _ in paged.lens)
    shape = (num_tokens, num_heads, paged.keys[0].shape[2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(paged.keys[0].dtype)


def attend(
    kernels: Kernels,
    paged: Paged,
    query: Tensor,
    block_size: int = 16,
    kv_format: str | None = None,
    **options: Any,
) -> Tensor:
    key_cache, value_cache, batch = paged.pages(block_size, kv_format)
    return kernels.paged_attention(
        query, key_cache, value_cache, batch, scale=query.shape[2] ** -0.5, **options
    )


def assert_near(got: Tensor, want: Tensor) -> None:
    """To a few roundings of the dtype."""
    near = {torch.float32: (3e-6, 1e-4), torch.bfloat16: (1e-2, 1e-2)}[want.dtype]
    torch.testing.assert_close(got, want, atol=near[0], rtol=near[1])


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [16, 40, 64, 80, 100, 256])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (9, 1)])
def test_it_agrees_with_the_reference(
    native_isa: Kernels,
    reference: Kernels,
    paged: type[Paged],
    head_size: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    case = paged.random(((1, 1), (5, 5), (40, 70), (1, 100)), heads[1], head_size, dtype)
    query = draw_query(case, heads[0])
    assert_near(attend(native_isa, case, query), attend(reference, case, query))


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("head_size", [20, 64, 80, 96])
def test_every_cache_format_agrees_with_the_reference(
    native_isa: Kernels, reference: Kernels, paged: type[Paged], head_size: int, kv_format: str
) -> None:
    """With one, few and many query rows, which take different ways through the kernel."""
    case = paged.random(((1, 1), (30, 70), (1, 90), (3, 100)), 2, head_size)
    query = draw_query(case, 6)
    assert_near(
        attend(native_isa, case, query, kv_format=kv_format),
        attend(reference, case, query, kv_format=kv_format),
    )


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("window", [1, 40, 70])
def test_what_is_behind_the_window_may_be_anything(
    native_isa: Kernels,
    paged: type[Paged],
    window: int,
    kv_format: str,
    dtype: torch.dtype,
) -> None:
    """Other sequences' numbers, also such that are not finite, in blocks that were given back."""
    case = paged.random(((1, 150), (30, 170), (3, 100), (5, 5)), 2, 40, dtype)
    query = draw_query(case, 4)
    want = attend(native_isa, case, query, kv_format=kv_format, window=window)
    keys, values, batch = case.pages(16, kv_format)
    case.give_back(window, (keys, values), batch)
    got = native_isa.paged_attention(query, keys, values, batch, scale=40**-0.5, window=window)
    assert want.isfinite().all() and torch.equal(got, want)


def _key_ends(lens: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Of sequences' last tokens: one behind themselves, or, within a span, where that ends."""
    found = list[int]()
    for count, end in lens:
        for position in range(end - count, end):
            ends = [min(last, end) for first, last in spans if first <= position < last]
            found.append(ends[0] if ends else position + 1)
    return torch.tensor(found, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 30}, {"soft_cap": 3.0}, {"sinks": SINKS[:4]}])
def test_positions_that_see_more_agree_with_the_reference(
    native_isa: Kernels,
    reference: Kernels,
    paged: type[Paged],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    case = paged.random(((100, 100), (70, 170), (1, 90), (40, 64), (1, 1)), 2, 40, dtype)
    query, ends = draw_query(case, 4), _key_ends(case.lens, [(3, 40), (60, 130), (150, 170)])
    got = attend(native_isa, case, query, key_ends=ends, **options)
    assert_near(got, attend(reference, case, query, key_ends=ends, **options))
    causal = attend(native_isa, case, query, **options)
    own = _key_ends(case.lens, [])
    assert torch.equal(attend(native_isa, case, query, key_ends=own, **options), causal)
    assert torch.equal(got[ends == own], causal[ends == own]), "others keep their bits"
    assert not torch.equal(got, causal)


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("options", [{}, {"window": 70}])
def test_chunks_that_divide_no_span_change_no_bit(
    native_isa: Kernels, paged: type[Paged], kv_format: str, options: dict[str, Any]
) -> None:
    whole = paged.random(((200, 200),), 2, 40)
    spans = [(3, 40), (60, 130), (150, 190)]
    query = draw_query(whole, 4)
    want = attend(
        native_isa, whole, query, kv_format=kv_format, key_ends=_key_ends(whole.lens, spans),
        **options,
    )  # fmt: skip
    cuts = [0, 1, 3, 40, 41, 60, 130, 149, 190, 199, 200]
    lens = tuple((end - start, end) for start, end in pairwise(cuts))
    parts = replace(
        whole,
        lens=lens,
        keys=tuple(whole.keys[0][:end] for _, end in lens),
        values=tuple(whole.values[0][:end] for _, end in lens),
    )
    for block_size in (16, 5):
        got = attend(
            native_isa, parts, query, block_size, kv_format=kv_format,
            key_ends=_key_ends(lens, spans), **options,
        )  # fmt: skip
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), block_size


@pytest.mark.parametrize("ends", [[1, 2, 2, 4], [1, 2, 3, 5], [1, 4, 3, 4], [-1, 2, 3, 4]], ids=str)
def test_positions_that_cannot_be_seen_are_refused(
    native_isa: Kernels, paged: type[Paged], ends: list[int]
) -> None:
    case = paged.random(((4, 4),), 2, 40)
    with pytest.raises(ValueError, match="is to see positions below"):
        key_ends = torch.tensor(ends, dtype=torch.int32)
        attend(native_isa, case, draw_query(case, 4), key_ends=key_ends)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"soft_cap": 3.0}, {"sinks": SINKS[:4]}])
def test_chunks_blocks_and_company_change_no_bit_in_any_format(
    native_isa: Kernels,
    paged: type[Paged],
    kv_format: str,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Prefill in one piece and in pieces of every width of register tile, decodes,
    alone and together."""
    whole = paged.random(((200, 200),), 2, 40, dtype)
    query = draw_query(whole, 4)
    want = attend(native_isa, whole, query, kv_format=kv_format, **options)
    cuts = [0, 1, 2, 5, 9, 16, 63, 64, 66, 129, 160, 199, 200]
    lens = tuple((end - start, end) for start, end in pairwise(cuts))
    parts = replace(
        whole,
        lens=lens,
        keys=tuple(whole.keys[0][:end] for _, end in lens),
        values=tuple(whole.values[0][:end] for _, end in lens),
    )
    for block_size in (16, 5):
        got = attend(native_isa, parts, query, block_size, kv_format=kv_format, **options)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), block_size


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 40},
        {"window": 1},
        {"soft_cap": 5.0},
        {"window": 33, "soft_cap": 2.0},
        {"sinks": SINKS},
        {"window": 33, "soft_cap": 2.0, "sinks": SINKS.bfloat16()},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_agree_with_the_reference(
    native_isa: Kernels,
    reference: Kernels,
    paged: type[Paged],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    case = paged.random(RAGGED, 2, 32, dtype)
    query = draw_query(case, 6)
    got, want = (
        attend(native_isa, case, query, **options),
        attend(reference, case, query, **options),
    )
    assert_near(got, want)


def test_more_query_heads_than_one_task_holds(
    native_isa: Kernels, reference: Kernels, paged: type[Paged]
) -> None:
    case = paged.random(((3, 40),), 1, 16)
    query = draw_query(case, 200)
    assert_near(attend(native_isa, case, query), attend(reference, case, query))


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_the_block_size_changes_no_bit(
    native_isa: Kernels, paged: type[Paged], dtype: torch.dtype, window: int | None
) -> None:
    case = paged.random(RAGGED, 1, 48, dtype)
    query = draw_query(case, 2)
    results = [
        attend(native_isa, case, query, block_size, window=window)
        for block_size in (1, 8, 16, 32, 5)
    ]
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_chunking_changes_no_bit(
    native_isa: Kernels, paged: type[Paged], chunk: int, window: int | None
) -> None:
    whole = paged.random(((150, 150),), 2, 32)
    query = draw_query(whole, 6)
    want = attend(native_isa, whole, query, window=window)
    for start in range(0, 150, chunk):
        end = min(150, start + chunk)
        part = replace(
            whole,
            lens=((end - start, end),),
            keys=(whole.keys[0][:end],),
            values=(whole.values[0][:end],),
        )
        assert torch.equal(
            attend(native_isa, part, query[start:end], window=window), want[start:end]
        ), start


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("sinks", [None, SINKS[:1]])
def test_chunking_a_long_context_changes_no_bit(
    native: Kernels, paged: type[Paged], sinks: Tensor | None
) -> None:
    """One thread goes through all splits; two compute them side by side and merge them."""
    whole = paged.random(((2100, 2100),), 1, 16)
    query = draw_query(whole, 1)
    cpu.set_num_threads(1)
    want = attend(native, whole, query, sinks=sinks)
    cpu.set_num_threads(2)
    for start, end in ((2099, 2100), (1000, 1100), (1023, 1025), (2040, 2050), (0, 1)):
        part = replace(
            whole,
            lens=((end - start, end),),
            keys=(whole.keys[0][:end],),
            values=(whole.values[0][:end],),
        )
        got = attend(native, part, query[start:end], sinks=sinks)
        assert torch.equal(got, want[start:end]), start


def test_sinks_join_the_softmax_once(native_isa: Kernels, paged: type[Paged]) -> None:
    """As much as they weigh, the keys weigh less: by the definition, in float64."""
    case = paged.random(((1, 1200), (9, 40)), 2, 16)
    query, sinks = draw_query(case, 6), SINKS.clone()
    got = attend(native_isa, case, query, sinks=sinks).double()
    row = 0
    for (count, context), keys, values in zip(case.lens, case.keys, case.values, strict=True):
        for position in range(context - count, context):
            for head in range(6):
                seen = keys[: position + 1, head // 3].double()
                scores = seen @ query[row, head].double() / 4
                shares = torch.softmax(torch.cat([scores, sinks[head : head + 1].double()]), 0)
                want = shares[:-1] @ values[: position + 1, head // 3].double()
                torch.testing.assert_close(got[row, head], want, atol=3e-6, rtol=1e-4)
            row += 1


def test_sinks_of_another_number_are_refused(native: Kernels, paged: type[Paged]) -> None:
    case = paged.random(((1, 5),), 2, 16)
    with pytest.raises(ValueError, match=r"expected sinks \[4\]"):
        attend(native, case, draw_query(case, 4), sinks=SINKS)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize(
    "options", [{}, {"window": 900}, {"window": 100}, {"soft_cap": 30.0}, {"sinks": SINKS[:2]}]
)
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_grow_are_rescaled_alike(
    native_isa: Kernels,
    reference: Kernels,
    paged: type[Paged],
    dtype: torch.dtype,
    kv_format: str,
    options: dict[str, Any],
) -> None:
    """Over several runs of tiles and a split: some rows find far higher scores than before,
    some never, some at once."""
    whole = paged.random(((75, 1150),), 1, 48, dtype)
    whole.keys[0][500::160] *= 8
    whole.keys[0][1000:] *= torch.linspace(1, 12, 150).to(dtype)[:, None, None]
    query = draw_query(whole, 2)
    got = attend(native_isa, whole, query, kv_format=kv_format, **options)
    want = attend(reference, whole, query, kv_format=kv_format, **options)
    near = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, atol=near, rtol=near)
    cuts = [0, 1, 2, 9, 24, 41, 75]
    lens = tuple((end - start, 1075 + end) for start, end in pairwise(cuts))
    parts = replace(
        whole,
        lens=lens,
        keys=tuple(whole.keys[0][:end] for _, end in lens),
        values=tuple(whole.values[0][:end] for _, end in lens),
    )
    assert torch.equal(attend(native_isa, parts, query, kv_format=kv_format, **options), got)


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8", "fp8"])
def test_queries_of_any_size_are_divided_alike(
    native_isa: Kernels, paged: type[Paged], kv_format: str
) -> None:
    """In one piece and row by row, from scores that are as good as zero to such
    as leave one weight alone."""
    whole = paged.random(((48, 150),), 1, 72, torch.bfloat16)
    query = (
        draw_query(whole, 2)
        * torch.exp2(torch.linspace(-100, 14, 48)).to(torch.bfloat16)[:, None, None]
    )
    want = attend(native_isa, whole, query, kv_format=kv_format)
    lens = tuple((1, end) for end in range(103, 151))
    rows = replace(
        whole,
        lens=lens,
        keys=tuple(whole.keys[0][:end] for _, end in lens),
        values=tuple(whole.values[0][:end] for _, end in lens),
    )
    assert want.isfinite().all()
    assert torch.equal(attend(native_isa, rows, query, kv_format=kv_format), want)


def test_company_changes_no_bit(native_isa: Kernels, paged: type[Paged]) -> None:
    case = paged.random(RAGGED, 2, 64)
    query = draw_query(case, 6)
    together, start = attend(native_isa, case, query), 0
    for index, (count, context) in enumerate(RAGGED):
        alone = replace(
            case, lens=((count, context),), keys=(case.keys[index],), values=(case.values[index],)
        )
        assert torch.equal(
            attend(native_isa, alone, query[start : start + count]), together[start : start + count]
        ), index
        start += count


def forks(
    paged: type[Paged], families: Sequence[tuple[int, Sequence[tuple[int, int]]]], **form: Any
) -> tuple[Paged, list[int]]:
    """Sequences of which each family begins with as many tokens of its first;
    and where each one's family begins."""
    lens = tuple(each for _, members in families for each in members)
    case = paged.random(lens, **form)
    leaders: list[int] = []
    for num_shared, members in families:
        leader = len(leaders)
        for index in range(leader, leader + len(members)):
            leaders.append(leader)
            for kind in (case.keys, case.values):
                kind[index][:num_shared] = kind[leader][:num_shared]
    return case, leaders


def share(
    batch: AttentionBatch,
    families: Sequence[tuple[int, Sequence[Any]]],
    leaders: list[int],
    block_size: int,
) -> AttentionBatch:
    """The same batch, with one copy of what a family shares."""
    tables = batch.block_tables.clone()
    shared = [num_shared for num_shared, members in families for _ in members]
    for index, leader in enumerate(leaders):
        count = shared[index] // block_size
        tables[index, :count] = tables[leader, :count]
    return replace(batch, block_tables=tables)


FAMILIES = (
    (200, ((1, 201), (1, 260), (1, 317), (1, 200), (2, 230), (1, 205))),
    (0, ((1, 40), (9, 70))),
    (1300, ((1, 1301), (1, 1403), (1, 1300))),
    (64, ((1, 64), (1, 64))),
)
"""Ends of tiles, splits and blocks on both sides of where sequences part."""


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize(
    "options", [{}, {"window": 1320}, {"soft_cap": 20.0, "window": 1320}, {"sinks": SINKS}]
)
@pytest.mark.parametrize(
    ("block_size", "kv_format"), [(16, "float32"), (8, "int8"), (64, "bfloat16"), (40, "fp8")]
)
def test_shared_blocks_change_no_bit(
    native_isa: Kernels,
    paged: type[Paged],
    block_size: int,
    kv_format: str,
    options: dict[str, Any],
) -> None:
    case, leaders = forks(paged, FAMILIES, num_kv_heads=2, head_size=24)
    query = draw_query(case, 6)
    keys, values, batch = case.pages(block_size, kv_format)
    shared = share(batch, FAMILIES, leaders, block_size)
    for threads in (1, 2):
        cpu.set_num_threads(threads)
        outputs = [
            native_isa.paged_attention(query, keys, values, each, scale=0.2, **options)
            for each in (batch, shared)
        ]
        assert torch.equal(*outputs)


def test_what_is_not_finite_stays_with_its_member(native_isa: Kernels, paged: type[Paged]) -> None:
    families = ((128, ((1, 140), (1, 150), (1, 160), (1, 170))),)
    case, leaders = forks(paged, families, num_kv_heads=4, head_size=16)
    query = draw_query(case, 8)
    keys, values, batch = case.pages(16)
    shared = share(batch, families, leaders, 16)
    clean = native_isa.paged_attention(query, keys, values, shared, scale=0.25)
    query[1, 3, 5] = float("nan")
    got = native_isa.paged_attention(query, keys, values, shared, scale=0.25)
    assert got[1, 3].isnan().all()
    got[1, 3] = clean[1, 3]
    assert torch.equal(got, clean)


def found_prefixes(
    tables: Tensor, contexts: list[int], window: int = 0, max_members: int = 99
) -> list[tuple[int, list[int]]]:
    """Groups of decoding sequences, blocks of 16."""
    from quire.kernels.cpu import _native

    starts, lens = (
        torch.arange(len(contexts) + 1, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
    )
    pointers = (
        starts.data_ptr(),
        lens.data_ptr(),
        len(contexts),
        tables.data_ptr(),
        tables.shape[1],
        16,
    )
    return sorted(
        (end, sorted(each)) for end, each in _native.shared_prefixes(*pointers, window, max_members)
    )


def test_those_who_share_are_found_wherever_they_stand(native: Kernels) -> None:
    tables = torch.arange(6 * 20, dtype=torch.int32).view(6, 20)
    tables[4, :10], tables[2, :9] = tables[0, :10], tables[0, :9]
    tables[5, :4] = tables[3, :4]
    tables[1, 1:4] = tables[0, 1:4]  # not from the beginning
    contexts = [320, 320, 200, 100, 300, 64]
    assert found_prefixes(tables, contexts) == [(64, [3, 5]), (128, [0, 2, 4])]
    assert found_prefixes(tables, contexts, max_members=2) == [(64, [3, 5]), (128, [0, 4])]
    assert found_prefixes(tables, contexts, max_members=1) == []
    assert found_prefixes(tables, contexts, window=120) == [(64, [3, 5])]
    assert found_prefixes(tables, [320, 320, 120, 100, 300, 63]) == [(128, [0, 4])]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=7),
    st.integers(2, 4),
)
@settings(max_examples=60)
def test_no_other_division_into_runs_reads_less(paths: list[list[int]], max_members: int) -> None:
    """Sequences as paths in a tree: the groups found save as many tiles as the best
    division of the sorted ones does."""
    if cpu.IMPORT_ERROR is not None:
        pytest.skip(cpu.IMPORT_ERROR)
    nodes: dict[tuple[int, ...], int] = {}
    tables = torch.full((len(paths), 24), -1, dtype=torch.int32)
    for index, path in enumerate(paths):
        for depth in range(len(path)):  # a tile of 64 is 4 blocks
            number = 4 * nodes.setdefault(tuple(path[: depth + 1]), len(nodes))
            tables[index, 4 * depth : 4 * depth + 4] = torch.arange(number, number + 4)
    groups = found_prefixes(tables, [64 * len(path) for path in paths], max_members=max_members)
    by_block = sorted(
        [nodes[tuple(path[: depth + 1])] for depth in range(len(path))] for path in paths
    )
    for end, members in groups:
        assert 2 <= len(members) <= max_members
        assert len({tuple(paths[each][: end // 64]) for each in members}) == 1
        assert all(64 * len(paths[each]) >= end for each in members)
    assert len({each for _, members in groups for each in members}) == sum(
        len(members) for _, members in groups
    )
    assert sum((len(members) - 1) * end // 64 for end, members in groups) == _most_saved(
        by_block, max_members
    )


def _most_saved(paths: list[list[int]], max_members: int) -> int:
    """By trying every length of the first run."""
    lengths = range(1, min(max_members, len(paths)) + 1)
    return max(
        ((n - 1) * _shared_len(paths[:n]) + _most_saved(paths[n:], max_members) for n in lengths),
        default=0,
    )


def _shared_len(paths: list[list[int]]) -> int:
    return next(
        (depth for depth, nodes in enumerate(zip(*paths, strict=False)) if len(set(nodes)) > 1),
        min(map(len, paths)),
    )


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("lens", [((1, 3000),), ((3, 2050), (1, 1024)), RAGGED])
def test_threads_and_splits_change_no_bit(
    native: Kernels, paged: type[Paged], lens: tuple[tuple[int, int], ...], window: int | None
) -> None:
    case = paged.random(lens, 1, 64)
    query = draw_query(case, 3)
    results = []
    # one thread goes through the splits in order; more compute them apart and merge
    for count in (1, 2, 3):
        cpu.set_num_threads(count)
        results.append(attend(native, case, query, window=window))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_non_finite_values_stay_with_the_rows_that_see_them(
    native_isa: Kernels, paged: type[Paged]
) -> None:
    case = paged.random(((40, 40), (40, 40)), 1, 16)
    query = draw_query(case, 2)
    clean = attend(native_isa, case, query)
    case.values[0][20], case.keys[0][20] = float("inf"), float("nan")
    got = attend(native_isa, case, query)
    assert torch.equal(got[:20], clean[:20])
    assert got[20:40].isnan().all()
    assert torch.equal(got[40:], clean[40:])


def test_large_scores_do_not_overflow(
    native_isa: Kernels, reference: Kernels, paged: type[Paged]
) -> None:
    case = paged.random(((8, 80),), 1, 32)
    query = draw_query(case, 2) * 300
    got = attend(native_isa, case, query)
    torch.testing.assert_close(got, attend(reference, case, query), atol=1e-3, rtol=1e-3)


def test_the_query_may_be_a_view_and_the_cache_of_another_dtype(
    native_isa: Kernels, reference: Kernels, paged: type[Paged]
) -> None:
    case = paged.random(((4, 30), (1, 9)), 2, 16, torch.bfloat16)
    wide = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(1))
    query = wide[:, 1:5]
    got = attend(native_isa, case, query)
    assert got.dtype == torch.float32
    key_cache, value_cache, batch = case.pages(16)
    want = reference.paged_attention(
        query.contiguous(), key_cache.float(), value_cache.float(), batch, scale=0.25
    )
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-4)


def test_an_empty_batch(native: Kernels) -> None:
    cache, none = torch.zeros(2, 1, 16, 8), torch.zeros(0, dtype=torch.int32)
    batch = AttentionBatch(
        torch.zeros(1, dtype=torch.int32),
        none,
        torch.zeros(0, 1, dtype=torch.int32),
        none.long(),
        none.long(),
        0,
        0,
    )
    assert native.paged_attention(torch.empty(0, 1, 8), cache, cache, batch, scale=1.0).shape == (
        0,
        1,
        8,
    )


def test_wrong_batches_are_refused(native: Kernels, paged: type[Paged]) -> None:
    case = paged.random(((2, 20),), 1, 16)
    query = draw_query(case, 2)
    keys, values, batch = case.pages(16)

    def run(query: Tensor = query, batch: AttentionBatch = batch, **options: Any) -> Tensor:
        return native.paged_attention(query, keys, values, batch, scale=1.0, **options)

    with pytest.raises(ValueError, match="names block 99 of 5"):
        run(batch=replace(batch, block_tables=torch.tensor([[0, 99]], dtype=torch.int32)))
    with pytest.raises(ValueError, match="a table of 2 blocks"):
        run(batch=replace(batch, context_len=torch.tensor([33], dtype=torch.int32)))
    with pytest.raises(ValueError, match="a context of 1"):
        run(batch=replace(batch, context_len=torch.tensor([1], dtype=torch.int32)))
    with pytest.raises(ValueError, match="query_start"):
        run(batch=replace(batch, query_start=torch.tensor([0, 3], dtype=torch.int32)))
    with pytest.raises(TypeError, match="expected int32"):
        run(batch=replace(batch, context_len=torch.tensor([20])))
    with pytest.raises(ValueError, match="does not fit a cache"):
        run(query=torch.zeros(2, 2, 8))
    with pytest.raises(ValueError, match="window=0"):
        run(window=0)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [20, 128])
def test_write_kv_agrees_with_the_reference_to_the_byte(
    native_isa: Kernels, reference: Kernels, dtype: torch.dtype, kv_format: str, head_size: int
) -> None:
    both = torch.randn(6, 4, head_size, generator=torch.Generator().manual_seed(2))
    magnitudes = torch.tensor([1.0, 1e-3, 1e4, 0.0, 1e-38, 3e38])[:, None, None]
    both = (both * magnitudes).clamp(-3e38, 3e38).to(dtype)
    key, value = both[:, :2], both[:, 2:]  # views of one projection
    slots = torch.tensor([11, 0, 7, 19, 3, 8])
    caches = [empty_cache(5, 2, 4, head_size, kv_format) for _ in range(4)]
    for cache in caches:
        cache.view(torch.uint8).zero_()
    native_isa.write_kv(key, value, caches[0], caches[1], slots)
    reference.write_kv(key, value, caches[2], caches[3], slots)
    assert torch.equal(caches[0].view(torch.uint8), caches[2].view(torch.uint8))
    assert torch.equal(caches[1].view(torch.uint8), caches[3].view(torch.uint8))
    assert caches[0].view(torch.uint8).count_nonzero() > 0


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_every_rounding_of_a_quantized_row_agrees_with_the_reference(
    native_isa: Kernels, reference: Kernels, kv_format: str
) -> None:
    """Rows whose scale is one hold every representable number, every tie between two,
    and their neighbours."""
    largest = {"int8": 127.0, "fp8": 448.0}[kv_format]
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = codes if kv_format == "fp8" else torch.arange(128.0)
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat(
        [numbers, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))]
    )
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, 1022 - 2 * len(x)), value=0.25).view(2, 511)
    x = torch.cat([x, torch.full((2, 1), largest)], dim=1)[:, None]
    caches = [empty_cache(1, 1, 2, 512, kv_format) for _ in range(4)]
    native_isa.write_kv(x, x, caches[0], caches[1], torch.arange(2))
    reference.write_kv(x, x, caches[2], caches[3], torch.arange(2))
    assert torch.equal(caches[0].view(torch.uint8), caches[2].view(torch.uint8))


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_in_a_quantized_row(
    native_isa: Kernels, paged: type[Paged], kv_format: str, bad: float
) -> None:
    case = paged.random(((40, 40),), 1, 32)
    case.values[0][20, 0, 3] = bad
    key_cache, value_cache, batch = case.pages(16, kv_format)
    slots = torch.tensor([batch.block_tables[0, 1].item() * 16 + 4])
    native_isa.write_kv(case.keys[0][20:21], case.values[0][20:21], key_cache, value_cache, slots)
    got = native_isa.paged_attention(draw_query(case, 1), key_cache, value_cache, batch, scale=1.0)
    assert got[:20].isfinite().all()
    assert not got[20:].isfinite().any()


def test_write_kv_refuses_what_does_not_fit(native: Kernels) -> None:
    key, cache = torch.zeros(1, 2, 4), torch.zeros(3, 2, 16, 4)
    with pytest.raises(ValueError, match="slot 48 is outside the cache's 48"):
        native.write_kv(key, key, cache, cache, torch.tensor([48]))
    with pytest.raises(ValueError, match="slot -1"):
        native.write_kv(key, key, cache, cache, torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"expected \[1\]"):
        native.write_kv(key, key, cache, cache, torch.tensor([1, 2]))
    with pytest.raises(TypeError, match=r"KV cache of torch.float64 is not one of"):
        native.write_kv(key, key, cache.double(), cache.double(), torch.tensor([1]))
    with pytest.raises(ValueError, match="do not fit"):
        wide = torch.zeros(3, 2, 16, 9, dtype=torch.int8)  # rows of 5 elements and a scale
        native.write_kv(key, key, wide, wide, torch.tensor([1]))
    with pytest.raises(ValueError, match="do not fit"):
        native.write_kv(torch.zeros(1, 3, 4), torch.zeros(1, 3, 4), cache, cache, torch.tensor([1]))


@pytest.mark.parametrize("name", ["native", "reference"])
def test_copy_blocks_reads_before_it_writes(name: str, request: pytest.FixtureRequest) -> None:
    kernels: Kernels = request.getfixturevalue(name)
    caches = [torch.arange(24.0).view(6, 2, 2), torch.arange(24.0).bfloat16().view(6, 4)]
    before = [cache.clone() for cache in caches]
    # 0 to 1 while 1 goes to 2
    kernels.copy_blocks(caches, torch.tensor([0, 1, 5]), torch.tensor([1, 2, 4]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 0, 1, 3, 5, 5]])


def test_copy_blocks_refuses_unknown_blocks(native: Kernels) -> None:
    with pytest.raises(ValueError, match="destination 6"):
        native.copy_blocks([torch.zeros(6, 2)], torch.tensor([0]), torch.tensor([6]))
