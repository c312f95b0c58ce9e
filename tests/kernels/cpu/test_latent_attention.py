"""Native attention over latents, and the weights of heads around it, against the reference; and the
bits that nothing may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.interface import Kernels
from tests.kernels.cpu.test_attention import FAMILIES, forks, share

if TYPE_CHECKING:
    from tests.kernels.conftest import Paged

RAGGED = ((1, 1), (5, 5), (40, 70), (1, 1100), (1, 100), (3, 33))
SIZES = [(32, 16), (48, 8), (20, 4), (512, 64)]
"""Of values, and of what is behind them in a row."""
DTYPES = [torch.float32, torch.bfloat16]
FORMATS = ["float32", "bfloat16", "int8", "fp8"]


@pytest.fixture
def native_isa(native_projections: Kernels) -> Kernels:
    return native_projections


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def draw_query(case: Paged, num_heads: int) -> Tensor:
    shape = (sum(count for count, _ in case.lens), num_heads, case.keys[0].shape[2])
    return draw(*shape).to(case.keys[0].dtype)


def attend(
    kernels: Kernels,
    case: Paged,
    query: Tensor,
    value_size: int,
    block_size: int = 16,
    kv_format: str | None = None,
) -> Tensor:
    """Keys and values are one tensor."""
    rows, _, batch = case.pages(block_size, kv_format)
    return kernels.paged_attention(query, rows, rows, batch, scale=0.12, value_size=value_size)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("num_heads", [3, 16])
@pytest.mark.parametrize(("value_size", "rest"), SIZES)
def test_it_agrees_with_the_reference(
    native_isa: Kernels,
    reference: Kernels,
    paged: type[Paged],
    value_size: int,
    rest: int,
    num_heads: int,
    kv_format: str,
    dtype: torch.dtype,
) -> None:
    lens = ((1, 1), (9, 40), (1, 90)) if value_size == 512 else RAGGED
    case = paged.random(lens, 1, value_size + rest, dtype)
    query = draw_query(case, num_heads)
    got = attend(native_isa, case, query, value_size, kv_format=kv_format)
    want = attend(reference, case, query, value_size, kv_format=kv_format)
    assert got.shape == (len(query), num_heads, value_size)
    near = 1e-2 if dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(got, want, atol=near, rtol=near)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_chunks_blocks_company_and_threads_change_no_bit(
    native_isa: Kernels,
    paged: type[Paged],
    kv_format: str,
    dtype: torch.dtype,
    restore_threads: None,
) -> None:
    case = paged.random(RAGGED, 1, 40, dtype)
    query = draw_query(case, 6)
    cpu.set_num_threads(1)
    want = attend(native_isa, case, query, 32, kv_format=kv_format)
    for num_threads, block_size in ((1, 4), (3, 16), (3, 48)):
        cpu.set_num_threads(num_threads)
        got = attend(native_isa, case, query, 32, block_size, kv_format)
        assert torch.equal(got, want)
    start = 0
    for index, (count, context) in enumerate(case.lens):
        rows = slice(start + count // 2, start + count)
        lens = ((count - count // 2, context),)
        alone = type(case)(lens, (case.keys[index],), (case.values[index],))
        got = attend(native_isa, alone, query[rows], 32, kv_format=kv_format)
        assert torch.equal(got, want[rows])
        start += count


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("value_size", [20, 64])
def test_shared_blocks_change_no_bit(
    native_isa: Kernels,
    paged: type[Paged],
    value_size: int,
    kv_format: str,
    dtype: torch.dtype,
) -> None:
    case, leaders = forks(paged, FAMILIES, num_kv_heads=1, head_size=value_size + 7, dtype=dtype)
    query, sinks = draw_query(case, 6), draw(6)
    rows, _, batch = case.pages(16, kv_format)
    found = []
    for threads in (1, 2):
        cpu.set_num_threads(threads)
        found += [
            native_isa.paged_attention(
                query, rows, rows, each, scale=0.2, sinks=sinks, value_size=value_size
            )
            for each in (batch, share(batch, FAMILIES, leaders, 16))
        ]
    assert found[0].isfinite().all()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_are_written_once(native_isa: Kernels, reference: Kernels, kv_format: str) -> None:
    from quire.kernels.kv_cache import empty_cache

    rows, slots = draw(7, 1, 40), torch.tensor([3, 9, 1, 0, 22, 17, 5])
    found = []
    for kernels in (native_isa, reference):
        cache = empty_cache(6, 1, 4, 40, kv_format)
        cache.view(torch.uint8).zero_()
        kernels.write_kv(rows, rows, cache, cache, slots)
        found.append(cache.view(torch.uint8))
    assert torch.equal(*found)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "outputs", "inputs", "rest"), [(3, 32, 20, 8), (5, 16, 64, 0)]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 150])
def test_heads_have_weights_of_their_own(
    native_isa: Kernels,
    reference: Kernels,
    num_tokens: int,
    num_heads: int,
    outputs: int,
    inputs: int,
    rest: int,
    dtype: torch.dtype,
    restore_threads: None,
) -> None:
    """The products are, to the bit, those of each head's weight by itself."""
    weight = (draw(num_heads * outputs, inputs) / inputs**0.5).to(dtype)
    x = draw(num_tokens, num_heads, inputs + rest).to(dtype)
    packed = native_isa.pack_linear(weight)
    got = native_isa.head_linear(x, packed)
    for head, part in enumerate(weight.split(outputs)):
        own = native_isa.linear(x[:, head, :inputs].contiguous(), native_isa.pack_linear(part))
        assert torch.equal(got[:, head, :outputs], own)
    assert torch.equal(got[..., outputs:], x[..., inputs:])
    want = reference.head_linear(x, reference.pack_linear(weight))
    near = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, atol=near, rtol=near)
    for num_threads in (1, 3):
        cpu.set_num_threads(num_threads)
        assert torch.equal(native_isa.head_linear(x, packed), got)
        last = native_isa.head_linear(x[-1:].contiguous(), packed)
        assert torch.equal(last, got[-1:])


def test_tails_are_rotated_where_they_begin(native_isa: Kernels, reference: Kernels) -> None:
    positions, angles = torch.tensor([3, 0, 7]), draw(8, 2, 4)
    for is_interleaved in (False, True):
        x = draw(3, 2, 20)
        got, want = x.clone(), x.clone()
        for kernels, heads in ((native_isa, got), (reference, want)):
            kernels.rope(heads, positions, angles, interleaved=is_interleaved, start=12)
        torch.testing.assert_close(got, want)
        tails = x[..., 12:].contiguous()
        reference.rope(tails, positions, angles, interleaved=is_interleaved)
        assert torch.equal(want[..., 12:], tails) and torch.equal(got[..., :12], x[..., :12])


def test_what_does_not_fit_is_refused(native: Kernels) -> None:
    packed = native.pack_linear(draw(48, 20))
    with pytest.raises(ValueError, match=r"head_linear: x is \[2, 3, 19\]"):
        native.head_linear(draw(2, 3, 19), packed)
    with pytest.raises(ValueError, match="one does not begin with a panel"):
        native.head_linear(draw(2, 2, 20), packed)
    with pytest.raises(ValueError, match="8 rotated dimensions from 13 on in a head of 20"):
        native.rope(draw(1, 1, 20), torch.tensor([0]), draw(4, 2, 4), start=13)
