"""Native attention of whole texts against the reference, on every instruction set; a text's bits
are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.interface import AttentionBatch, Kernels

LENGTHS = (1, 5, 64, 65, 130, 12)


def batch_of(lengths: Sequence[int]) -> AttentionBatch:
    return AttentionBatch(
        query_start=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        context_len=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32),
        slots=torch.zeros(sum(lengths), dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        max_query_len=max(lengths),
        max_context_len=max(lengths),
    )


def rows_of(
    lengths: Sequence[int], heads: tuple[int, int], size: int, dtype: torch.dtype
) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    width = heads[0] + 2 * heads[1]
    return torch.randn((sum(lengths), width, size), generator=generator).to(dtype)


def attend(
    kernels: Kernels,
    rows: Tensor,
    lengths: Sequence[int],
    heads: tuple[int, int],
    contexts: Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    query, key, value = torch.split(rows, [heads[0], heads[1], heads[1]], dim=1)
    scale, batch = rows.shape[2] ** -0.5, batch_of(lengths)
    if contexts is not None:
        batch.context_len.copy_(torch.tensor(contexts))
    return kernels.bidirectional_attention(query, key, value, batch, scale=scale, **options)


def assert_near(got: Tensor, want: Tensor) -> None:
    near = {torch.float32: (3e-6, 1e-4), torch.bfloat16: (1e-2, 1e-2)}[want.dtype]
    torch.testing.assert_close(got, want, atol=near[0], rtol=near[1])


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 40, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("window", [None, 9, 65])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_agrees_with_the_reference(
    native_isa: Kernels, reference: Kernels, dtype: torch.dtype, size: int,
    heads: tuple[int, int], window: int | None, has_bias: bool,
) -> None:  # fmt: skip
    rows = rows_of(LENGTHS, heads, size, dtype)
    bias = torch.randn(heads[0], 2 * max(LENGTHS) - 1) if has_bias else None
    options: dict[str, Any] = {"window": window, "bias": bias}
    got = attend(native_isa, rows, LENGTHS, heads, **options)
    assert_near(got, attend(reference, rows, LENGTHS, heads, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 33])
def test_a_texts_bits_do_not_depend_on_its_company_or_on_threads(
    native_isa: Kernels, dtype: torch.dtype, window: int | None
) -> None:
    lengths = (*LENGTHS, 1100)
    heads = (4, 2)
    rows = rows_of(lengths, heads, 32, dtype)
    bias = torch.randn(4, 2 * max(lengths) - 1)
    together = attend(native_isa, rows, lengths, heads, window=window, bias=bias)
    num_threads = cpu.num_threads()
    try:
        for threads in (1, 3):
            cpu.set_num_threads(threads)
            parts = zip(
                torch.split(rows, [*lengths]),
                torch.split(together, [*lengths]),
                lengths,
                strict=True,
            )
            for part, found, length in parts:
                alone = attend(
                    native_isa, part.contiguous(), (length,), heads, window=window, bias=bias
                )
                assert torch.equal(alone, found)
    finally:
        cpu.set_num_threads(num_threads)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_behind_the_context_attend_and_nothing_attends_to_them(
    native_isa: Kernels, reference: Kernels, window: int | None
) -> None:
    heads, contexts = (4, 2), (1, 3, 40, 64, 129, 12)
    rows = rows_of(LENGTHS, heads, 32, torch.float32)
    found = attend(native_isa, rows, LENGTHS, heads, contexts, window=window)
    assert_near(found, attend(reference, rows, LENGTHS, heads, contexts, window=window))
    starts = [0, *accumulate(LENGTHS)]
    hidden = rows.clone()
    for start, length, context in zip(starts, LENGTHS, contexts, strict=False):
        hidden[start + context : start + length, heads[0] :] = torch.nan
        alone = hidden[start : start + length].contiguous()
        got = attend(native_isa, alone, (length,), heads, (context,), window=window)
        assert torch.equal(got, found[start : start + length]), "their keys are not read"
    assert_near(found, attend(native_isa, hidden, LENGTHS, heads, contexts, window=window))


def test_a_row_that_would_see_nothing_is_refused(native: Kernels) -> None:
    rows = rows_of((9,), (2, 2), 16, torch.float32)
    for context, window in ((0, None), (3, 6), (10, None)):
        with pytest.raises(ValueError, match="9 rows of a context"):
            attend(native, rows, (9,), (2, 2), (context,), window=window)


def test_wrong_arguments_are_refused(native: Kernels) -> None:
    rows = rows_of((4, 3), (2, 2), 16, torch.float32)
    query, key, value = torch.split(rows, [2, 2, 2], dim=1)
    attend_all, batch = native.bidirectional_attention, batch_of((4, 3))
    with pytest.raises(ValueError, match="a bias float32"):
        attend_all(query, key, value, batch, scale=1.0, bias=torch.zeros(1, 7))
    with pytest.raises(ValueError, match="rows of a context"):
        attend_all(query, key, value, batch, scale=1.0, bias=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="not rows of one tensor"):
        attend_all(query, key.contiguous(), value, batch, scale=1.0)
    batch.context_len[0] = 5
    with pytest.raises(ValueError, match="rows of a context"):
        attend_all(query, key, value, batch, scale=1.0)
