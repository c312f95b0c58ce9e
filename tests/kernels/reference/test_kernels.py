"""The reference back end against torch's own operators, and its rows against their company."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from quire.kernels.interface import Kernels, QuantizedWeight

if TYPE_CHECKING:
    from tests.kernels.conftest import Paged

LENS = ((1, 9), (4, 20), (6, 6))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_attention_is_scaled_dot_product_attention(
    reference: Kernels, paged: type[Paged], block_size: int, window: int | None
) -> None:
    case = paged.random(LENS, 2, 16)
    query, start = draw(11, 6, 16), 0
    got = reference.paged_attention(query, *case.pages(block_size), scale=0.3, window=window)
    for index, (count, context) in enumerate(LENS):
        mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
        if window is not None:
            mask &= torch.ones(count, context, dtype=torch.bool).triu(context - count - window + 1)
        keys, values = (
            each[index].transpose(0, 1).repeat_interleave(3, 0) for each in (case.keys, case.values)
        )
        rows = query[start : start + count].transpose(0, 1)
        want = functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, scale=0.3
        )
        torch.testing.assert_close(
            got[start : start + count], want.transpose(0, 1), atol=1e-6, rtol=1e-5
        )
        start += count


def test_linear_and_norms_are_torchs(reference: Kernels) -> None:
    x, weight, bias, gain = draw(5, 12), draw(7, 12), draw(7), draw(12)
    packed = reference.pack_linear(weight, bias)
    torch.testing.assert_close(reference.linear(x, packed), functional.linear(x, weight, bias))
    torch.testing.assert_close(
        reference.rms_norm(x, gain, 1e-5), functional.rms_norm(x, (12,), gain, 1e-5)
    )
    want = functional.layer_norm(x, (12,), gain, gain, 1e-5)
    torch.testing.assert_close(reference.layer_norm(x, gain, gain, 1e-5), want)


def test_rope_turns_pairs(reference: Kernels) -> None:
    angles = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.1]))
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1)
    x, positions = draw(3, 2, 6), torch.tensor([4, 0, 8])
    halves, neighbours = x.clone(), x.clone()
    reference.rope(halves, positions, cos_sin)
    reference.rope(neighbours, positions, cos_sin, interleaved=True)
    turn = torch.polar(torch.ones(3, 1, 2), angles[positions].unsqueeze(1))
    want = torch.complex(x[..., :2], x[..., 2:4]) * turn
    torch.testing.assert_close(halves, torch.cat([want.real, want.imag, x[..., 4:]], dim=-1))
    want = torch.view_as_complex(x[..., :4].reshape(3, 2, 2, 2)) * turn
    torch.testing.assert_close(
        neighbours, torch.cat([torch.view_as_real(want).flatten(-2), x[..., 4:]], dim=-1)
    )


def test_rows_do_not_depend_on_their_company(reference: Kernels, paged: type[Paged]) -> None:
    x, packed = draw(40, 300), reference.pack_linear(draw(50, 300))
    whole = reference.linear(x, packed)
    for row in (0, 7, 39):
        assert torch.equal(reference.linear(x[row : row + 1], packed)[0], whole[row])
    case = paged.random(LENS, 2, 16)
    query = draw(11, 6, 16)
    together = reference.paged_attention(query, *case.pages(16), scale=0.3)
    alone = paged(LENS[1:2], case.keys[1:2], case.values[1:2])
    assert torch.equal(
        reference.paged_attention(query[1:5], *alone.pages(8), scale=0.3), together[1:5]
    )


def test_wrong_arguments_are_refused(reference: Kernels) -> None:
    packed = reference.pack_linear(draw(5, 8))
    with pytest.raises(ValueError, match="8 inputs"):
        reference.linear(draw(2, 9), packed)
    with pytest.raises(ValueError, match="bias"):
        reference.pack_linear(draw(5, 8), draw(4))
    with pytest.raises(ValueError, match="'relu'"):
        reference.activate(draw(2, 2), "relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("group_size", [4, 12])
def test_quantized_linear_is_the_dequantized_one(reference: Kernels, group_size: int) -> None:
    values = torch.randint(
        -8, 8, (7, 12), generator=torch.Generator().manual_seed(1), dtype=torch.int8
    )
    grid, x, bias = (7, 12 // group_size), draw(5, 12), draw(7)
    weight = QuantizedWeight(values, draw(*grid).abs(), draw(*grid), 4, group_size, "float")
    dense = values * weight.scales.repeat_interleave(group_size, 1) + draw(*grid).repeat_interleave(
        group_size, 1
    )
    want = functional.linear(x, dense, bias)
    torch.testing.assert_close(reference.linear(x, reference.pack_quantized(weight, bias)), want)
    coarse = dataclasses.replace(weight, activations="int8")
    step = x.abs().amax(dim=1, keepdim=True) / 127
    rounded = functional.linear((x / step).round() * step, dense, bias)
    torch.testing.assert_close(reference.linear(x, reference.pack_quantized(coarse, bias)), rounded)
    assert not torch.equal(rounded, want)


def test_quantized_weights_of_the_wrong_shape_are_refused(reference: Kernels) -> None:
    weight = QuantizedWeight(
        torch.zeros(7, 12, dtype=torch.int8), torch.ones(7, 2), None, 8, 5, "int8"
    )
    with pytest.raises(ValueError, match="group size 5 does not divide the 12 inputs"):
        reference.pack_quantized(weight)
