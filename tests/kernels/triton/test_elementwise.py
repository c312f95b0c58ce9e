"""Triton's norms, activations, gathers and RoPE against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.interface import Kernels
from quire.kernels.kv_cache import empty_cache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    """To a rounding of the dtype."""
    near = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[want.dtype]
    torch.testing.assert_close(got.cpu(), want, atol=near, rtol=near)


@pytest.mark.slow_combinations
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 96, 1030])
def test_norms(
    kernels: Kernels, reference: Kernels, device: torch.device, dtype: torch.dtype, width: int
) -> None:
    x, residual = draw(5, width, dtype=dtype), draw(5, width, dtype=dtype).flip(0)
    weight, bias = draw(width), draw(width).flip(0)
    there = (x.to(device), residual.to(device), weight.to(device), bias.to(device))
    offset = {"weight_offset": 1.0}
    assert_near(
        kernels.rms_norm(there[0], there[2], 1e-6, **offset),
        reference.rms_norm(x, weight, 1e-6, **offset),
    )
    got, want = (
        kernels.add_rms_norm(*there[:3], 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
    )
    assert torch.equal(got[1].cpu(), want[1])
    assert_near(got[0], want[0])
    assert_near(
        kernels.layer_norm(there[0], there[2], there[3], 1e-6),
        reference.layer_norm(x, weight, bias, 1e-6),
    )
    assert_near(
        kernels.layer_norm(there[0], there[2], None, 1e-6),
        reference.layer_norm(x, weight, None, 1e-6),
    )


def test_norms_of_a_row_do_not_depend_on_others(kernels: Kernels, device: torch.device) -> None:
    x, weight = draw(9, 300).to(device), draw(300).to(device)
    whole = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(kernels.rms_norm(x[4:6].contiguous(), weight, 1e-6), whole[4:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "gelu_sigmoid"])
def test_activations(
    kernels: Kernels, reference: Kernels, device: torch.device, dtype: torch.dtype, activation: Any
) -> None:
    x = torch.cat([draw(3, 70) * 3, torch.tensor([[-90.0, 0.0, 90.0] + [0.5] * 67])]).to(dtype)
    assert_near(kernels.activate(x.to(device), activation), reference.activate(x, activation))
    assert_near(kernels.gated(x.to(device), activation), reference.gated(x, activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_that_is_limited_on_both_sides(
    kernels: Kernels, reference: Kernels, device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.cat([draw(3, 70) * 6, torch.tensor([[-90.0, 0.0, 90.0, 7.0, -7.0] * 14])]).to(dtype)
    x[0, 1] = x[1, 40] = torch.nan
    got, want = (
        kernels.gated(x.to(device), "clamped_swish"),
        reference.gated(x, "clamped_swish"),
    )
    assert_near(got.nan_to_num(99.0), want.nan_to_num(99.0))
    with pytest.raises(ValueError, match="'clamped_swish' is not one of silu"):
        kernels.activate(x.to(device), "clamped_swish")  # type: ignore[arg-type]


def test_an_unknown_activation_is_refused(kernels: Kernels, device: torch.device) -> None:
    with pytest.raises(ValueError, match="relu"):
        kernels.activate(torch.zeros(1, 2, device=device), "relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    table, ids = draw(11, 1100, dtype=dtype), torch.tensor([3, 10, 0, 3])
    assert torch.equal(kernels.embedding(ids.to(device), table.to(device)).cpu(), table[ids])


def test_an_id_outside_the_table_gives_numbers_that_are_not_finite(
    kernels: Kernels, device: torch.device
) -> None:
    table = draw(11, 20).to(device)
    got = kernels.embedding(torch.tensor([3, 11, -1], device=device), table)
    assert not kernels.is_finite(got)
    assert got[0].isfinite().all()
    assert got[1:].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_is_finite(kernels: Kernels, device: torch.device, bad: float) -> None:
    x = draw(3, 5000).to(device)
    assert kernels.is_finite(x)
    assert kernels.is_finite(x[:0])
    x[2, 4999] = bad
    assert not kernels.is_finite(x)
    assert kernels.finite_rows(x).tolist() == [True, True, False]
    assert kernels.finite_rows(x[:0]).shape == (0,)
    assert (
        kernels.is_finite(x[:, :0]) and kernels.is_finite(x[0, 0]) and not kernels.is_finite(x[2])
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "rotated"), [(32, 32), (20, 12), (64, 2)])
def test_rope(
    kernels: Kernels,
    reference: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    interleaved: bool,
    head_size: int,
    rotated: int,
) -> None:
    both = draw(4, 5, head_size, dtype=dtype)
    table, positions = draw(10, 2, rotated // 2), torch.tensor([9, 0, 3, 3])
    want = both.clone()
    reference.rope(want[:, 1:4], positions, table, interleaved=interleaved)
    got = both.to(device)
    kernels.rope(got[:, 1:4], positions.to(device), table.to(device), interleaved=interleaved)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)]
)
def test_write_kv(
    kernels: Kernels,
    reference: Kernels,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    both, slots = draw(6, 4, 20, dtype=dtypes[0]), torch.tensor([11, 0, 7, 19, 3, 8])
    want = [torch.zeros(5, 2, 4, 20, dtype=dtypes[1]) for _ in range(2)]
    got = [cache.to(device, copy=True) for cache in want]
    there = both.to(device)
    reference.write_kv(both[:, :2], both[:, 2:], want[0], want[1], slots)
    kernels.write_kv(there[:, :2], there[:, 2:], got[0], got[1], slots.to(device))
    assert torch.equal(got[0].cpu(), want[0])
    assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_quantized_rows_have_the_references_bits(
    kernels: Kernels, reference: Kernels, device: torch.device, kv_format: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    both = (
        torch.randn(9, 4, 20, generator=generator)
        * torch.rand(9, 4, 1, generator=generator).mul(30).exp()
    )
    both[0, 0], both[1, 1], both[2, 2] = (
        0.0,
        torch.arange(20.0) * 2.0**-128,
        torch.linspace(-448, 448, 20),
    )
    slots = torch.randperm(12, generator=generator)[:9]
    want = [empty_cache(3, 2, 4, 20, kv_format) for _ in range(2)]
    for cache in want:
        cache.view(torch.uint8).zero_()
    got = [cache.to(device, copy=True) for cache in want]
    reference.write_kv(both[:, :2], both[:, 2:], want[0], want[1], slots)
    there = both.to(device)
    kernels.write_kv(there[:, :2], there[:, 2:], got[0], got[1], slots.to(device))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_quantized_row_that_is_not_finite_counts_as_such(
    kernels: Kernels, device: torch.device, kv_format: str, bad: float
) -> None:
    row, cache = torch.ones(1, 1, 8, device=device), empty_cache(1, 1, 1, 8, kv_format, device)
    row[0, 0, 3] = bad
    kernels.write_kv(row, row, cache, cache, torch.zeros(1, dtype=torch.int64, device=device))
    assert cache.view(torch.float32)[0, 0, 0, 2].isnan()


def test_chains_of_block_copies_read_the_old_blocks(kernels: Kernels, device: torch.device) -> None:
    cache = torch.arange(4.0).view(4, 1, 1, 1).repeat(1, 2, 3, 2).to(device)
    narrow = cache.to(torch.float8_e4m3fn)
    odd = cache[:, :1, :1, :1].to(torch.int8).contiguous()
    kernels.copy_blocks(
        [cache, narrow, odd, cache[:0]],
        torch.tensor([0, 1], device=device),
        torch.tensor([1, 2], device=device),
    )
    assert odd.flatten().tolist() == [0, 0, 1, 3]
    assert cache[:, 0, 0, 0].tolist() == [0.0, 0.0, 1.0, 3.0]
    assert torch.equal(narrow.float(), cache)
