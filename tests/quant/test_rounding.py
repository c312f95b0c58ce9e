"""Rounding to integers: errors within bounds, a search that pays, scales that bfloat16 holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.kernels.reference.linear import dequantized
from quire.quant.formats import IntegerFormat
from quire.quant.rounding import quantize

INT4 = IntegerFormat(4, 32, "int8")


def _weight(num_outputs: int = 70, num_inputs: int = 96) -> Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1))


def _best_of_many(weight: Tensor, group_size: int) -> Tensor:
    """The smallest squared error of each group over 4,000 scales of either sign,
    without shortcuts."""
    groups = weight.view(-1, group_size)
    factors = torch.linspace(0.05, 0.25, 2000)
    scales = groups.abs().amax(1, keepdim=True) * torch.cat([factors, -factors])
    errors = [
        ((groups / s).round().clamp(-8, 7) * s - groups).square().sum(1)
        for s in scales.T[:, :, None]
    ]
    return torch.stack(errors).amin(0)


def test_int8_rounds_to_the_nearest_step() -> None:
    weight = _weight()
    quantized = quantize(weight, IntegerFormat(8, 96, "int8"))
    error = (dequantized(quantized) - weight).abs()
    assert (error <= quantized.scales / 2 * (1 + 1e-5)).all()
    assert quantized.values.abs().amax() <= 127 and (quantized.values.abs().amax(1) >= 126).all()
    assert (quantized.scales.bfloat16().float() == quantized.scales).all()


def test_int4_comes_close_to_an_exhaustive_search() -> None:
    weight = _weight()
    quantized = quantize(weight, INT4)
    errors = (dequantized(quantized) - weight).view(-1, 32).square().sum(1)
    naive = weight.view(-1, 32).abs().amax(1, keepdim=True) / 7
    naive_errors = (
        ((weight.view(-1, 32) / naive).round() * naive - weight.view(-1, 32)).square().sum(1)
    )
    assert errors.sum() < 1.04 * _best_of_many(weight, 32).sum()
    assert errors.sum() < 0.75 * naive_errors.sum(), (
        "the search gains little over the obvious scale"
    )
    assert quantized.values.amin() == -8 and quantized.values.amax() == 7
    assert (quantized.scales.bfloat16().float() == quantized.scales).all() and (
        quantized.scales < 0
    ).any()


@pytest.mark.parametrize("held", [INT4, IntegerFormat(8, 96, "int8")])
def test_rows_do_not_depend_on_each_other(held: IntegerFormat) -> None:
    weight = _weight(num_outputs=1500)
    whole, part = quantize(weight, held), quantize(weight[1000:1010].clone(), held)
    assert (whole.values[1000:1010] == part.values).all() and (
        whole.scales[1000:1010] == part.scales
    ).all()


def test_what_fits_exactly_stays_exact() -> None:
    integers = torch.randint(-8, 8, (5, 96), generator=torch.Generator().manual_seed(2)).float()
    integers[:, ::32] = -8
    assert (dequantized(quantize(integers / 16, INT4)) == integers / 16).all()


def test_zeros_stay_zeros_and_tiny_weights_stay_finite() -> None:
    weight = torch.zeros(3, 96)
    weight[1] = 1e-38
    for held in (INT4, IntegerFormat(8, 96, "int8")):
        assert (dequantized(quantize(torch.zeros(3, 96), held)) == 0).all()
        assert dequantized(quantize(weight, held)).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("held", [INT4, IntegerFormat(8, 96, "int8")])
def test_weights_that_are_not_finite_are_refused(bad: float, held: IntegerFormat) -> None:
    weight = _weight()
    weight[50, 40] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        quantize(weight, held)
