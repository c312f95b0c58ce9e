"""Operations on `QuantizedWeight` that change its form and not its meaning: choosing rows,
finer groups, stacking."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.interface import QuantizedWeight
from quire.quant.formats import IntegerFormat, join


def dequantize(weight: QuantizedWeight) -> Tensor:
    """float32 [N, K]"""
    groups = weight.values.float().view(*weight.scales.shape, weight.group_size)
    product = groups * weight.scales[:, :, None]
    if weight.offsets is not None:
        product += weight.offsets[:, :, None]
    return product.view(weight.values.shape)


def rows_of(weight: QuantizedWeight, chosen: Tensor) -> QuantizedWeight:
    """Return the outputs `chosen` (int64 [n]), in that order."""
    offsets = None if weight.offsets is None else weight.offsets[chosen]
    # torch does not index fp8
    values = weight.values.view(torch.int8)[chosen].view(weight.values.dtype)
    return dataclasses.replace(weight, values=values, scales=weight.scales[chosen], offsets=offsets)


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight of all outputs, in the narrowest form that holds every part exactly (see
    `quire.quant.formats.join`).

    The parts are integers all, or e4m3 numbers all.
    """
    if len(weights) == 1:
        return weights[0]
    held = join(format_of(weight) for weight in weights)
    finer = [_refined(weight, held.group_size) for weight in weights]
    zeros = [
        torch.zeros_like(each.scales) if each.offsets is None else each.offsets for each in finer
    ]
    return QuantizedWeight(
        values=torch.cat([each.values.view(torch.int8) for each in finer]).view(
            weights[0].values.dtype
        ),
        scales=torch.cat([each.scales for each in finer]),
        offsets=torch.cat(zeros) if held.has_offsets else None,
        bits=held.bits,
        group_size=held.group_size,
        activations=held.activations,
        is_mxfp4=held.is_mxfp4,
    )


def format_of(weight: QuantizedWeight) -> IntegerFormat:
    """Return the form of a weight without its numbers."""
    return IntegerFormat(
        weight.bits,
        weight.group_size,
        weight.activations,
        weight.offsets is not None,
        weight.is_fp8,
        weight.is_mxfp4,
    )


def _refined(weight: QuantizedWeight, group_size: int) -> QuantizedWeight:
    """Return the same weight in smaller groups."""
    times = weight.group_size // group_size
    if times == 1:
        return weight
    offsets = None if weight.offsets is None else weight.offsets.repeat_interleave(times, dim=1)
    scales = weight.scales.repeat_interleave(times, dim=1)
    return dataclasses.replace(weight, scales=scales, offsets=offsets, group_size=group_size)
