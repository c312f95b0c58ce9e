"""Triton's attention over latents, and the weights of heads around it, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernel_cases import thorough
from torch import Tensor

from quire.kernels import load
from quire.kernels.interface import Kernels

if TYPE_CHECKING:
    from tests.kernels.conftest import Paged

REFERENCE = load("reference")
RAGGED = ((1, 1), (5, 5), (18, 40), (1, 150), (2, 33))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def draw_query(case: Paged, num_heads: int) -> Tensor:
    shape = (sum(count for count, _ in case.lens), num_heads, case.keys[0].shape[2])
    return draw(*shape).to(case.keys[0].dtype)


@pytest.fixture
def attend(device: torch.device, move: Callable[[Any], Any]) -> Callable[..., Tensor]:
    def run(
        kernels: Kernels, case: Paged, query: Tensor, value_size: int, block_size: int = 16,
        kv_format: str | None = None,
    ) -> Tensor:  # fmt: skip
        rows, _, batch = case.pages(block_size, kv_format)
        if kernels.name != "reference":
            rows, batch, query = rows.to(device), move(batch), query.to(device)
        out = kernels.paged_attention(query, rows, rows, batch, scale=0.2, value_size=value_size)
        return out.cpu()

    return run


@pytest.mark.slow_except("*-None")
@pytest.mark.parametrize(
    ("num_heads", "sizes", "dtype", "kv_format"),
    [
        (3, (32, 8), torch.float32, None),
        thorough(20, (24, 12), torch.bfloat16, None),
        (4, (32, 16), torch.bfloat16, "int8"),
        (4, (32, 16), torch.float32, "fp8"),
        thorough(16, (512, 64), torch.bfloat16, None),
    ],
)
def test_it_agrees_with_the_reference_and_blocks_change_no_bit(
    kernels: Kernels,
    paged: type[Paged],
    attend: Callable[..., Tensor],
    num_heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    kv_format: str | None,
) -> None:
    case = paged.random(RAGGED, 1, sum(sizes), dtype)
    query = draw_query(case, num_heads)
    got = attend(kernels, case, query, sizes[0], kv_format=kv_format)
    near = 2e-2 if dtype is torch.bfloat16 else 1e-5
    want = attend(REFERENCE, case, query, sizes[0], kv_format=kv_format)
    torch.testing.assert_close(got, want, atol=near, rtol=near)
    assert torch.equal(attend(kernels, case, query, sizes[0], 4, kv_format), got)


@pytest.mark.slow
def test_company_and_parallel_splits_change_no_bit(
    kernels: Kernels, paged: type[Paged], attend: Callable[..., Tensor]
) -> None:
    from quire.kernels.triton.kernels import TritonKernels

    assert isinstance(kernels, TritonKernels)
    case = paged.random(RAGGED, 1, 40, torch.float32)
    query = draw_query(case, 4)
    want = attend(kernels, case, query, 32)
    start = 0
    for index, (count, context) in enumerate(case.lens):
        alone = type(case)(((1, context),), (case.keys[index],), (case.values[index],))
        start += count
        assert torch.equal(
            attend(kernels, alone, query[start - 1 : start], 32), want[start - 1 :][:1]
        )
    figures = kernels.tuning
    for num_programs in (0, 10**6):  # never side by side, and always
        other = TritonKernels(kernels.device, replace(figures, num_programs=num_programs))
        assert torch.equal(attend(other, case, query, 32), want)


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_heads_have_weights_of_their_own(
    kernels: Kernels, device: torch.device, num_tokens: int
) -> None:
    weight, x = draw(3 * 16, 24), draw(num_tokens, 3, 30)
    got = kernels.head_linear(x.to(device), kernels.pack_linear(weight)).cpu()
    want = REFERENCE.head_linear(x, REFERENCE.pack_linear(weight))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    last = kernels.head_linear(x[-1:].to(device), kernels.pack_linear(weight)).cpu()
    assert torch.equal(last, got[-1:])


def test_tails_are_rotated_and_rows_written_once(kernels: Kernels, device: torch.device) -> None:
    positions, angles, x = torch.tensor([3, 0, 7]), draw(8, 2, 4), draw(3, 2, 20)
    for is_interleaved in (False, True):
        got, want = x.to(device, copy=True), x.clone()
        there = angles.to(device)
        kernels.rope(got, positions.to(device), there, interleaved=is_interleaved, start=12)
        REFERENCE.rope(want, positions, angles, interleaved=is_interleaved, start=12)
        torch.testing.assert_close(got.cpu(), want)
    rows, slots = draw(3, 1, 40), torch.tensor([3, 9, 1])
    cache = torch.zeros(3, 1, 4, 40, device=device)
    kernels.write_kv(rows.to(device), rows.to(device), cache, cache, slots.to(device))
    assert torch.equal(cache.cpu().view(12, 40)[slots], rows[:, 0])


def test_rows_that_are_too_long_are_refused(kernels: Kernels, paged: type[Paged]) -> None:
    case = paged.random(((1, 3),), 1, 600)
    rows, _, batch = case.pages(4)
    with pytest.raises(ValueError, match="up to 512 values and 1 to 128 elements behind them"):
        kernels.paged_attention(draw_query(case, 2), rows, rows, batch, scale=0.1, value_size=520)
