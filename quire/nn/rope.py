"""Tables of cosines and sines from a `RopeSpec`.

The arithmetic is float32 in the order of the Hugging Face implementation, on purpose: models are
trained and checked against it, and at position 100,000 a more exact angle is a different one.

Two variants depend, in Hugging Face, on how long the sequence is *now*, so that a token's K would
change while the sequence grows. Here a token's K never depends on later tokens; the choice is made
once, from `max_model_len`:
  * dynamic: the base is scaled as for `max_model_len` tokens if that exceeds the original context,
    else left alone;
  * longrope: the long factors serve if and only if `max_model_len` exceeds the original context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeSpec,
    YarnScaling,
)


def rope_table(spec: RopeSpec, max_model_len: int) -> Tensor:
    """float32 [max_model_len, 2, rotated_dim / 2]: cosines, then sines, of every position."""
    frequencies, magnitude = _frequencies(spec, max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos() * magnitude, angles.sin() * magnitude), dim=1)


def mixed_rotations(table: Tensor, positions: Tensor, axes: tuple[int, ...]) -> Tensor:
    """float32 [N, 2, pairs]: of each token, pairs by its three positions, int64 [3, N], as
    `RopeSpec.axes` says; of a table as `rope_table` makes it."""
    places = positions[list(axes)].transpose(0, 1)
    pairs = torch.arange(len(axes), device=table.device)
    return table[places, :, pairs].transpose(1, 2).contiguous()


def grid_rotations(spec: RopeSpec, rows: Tensor, columns: Tensor) -> Tensor:
    """float32 [N, 2, rotated_dim / 2] for patches in these rows and columns: see
    `RopeSpec.is_of_grid`."""
    frequencies = _plain(spec.theta, spec.rotated_dim // 2)
    angles = torch.cat([place[:, None].float() * frequencies for place in (rows, columns)], dim=1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def _frequencies(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Angle per position, float32 [rotated_dim / 2], and the factor on cosines and sines."""
    match spec.scaling:
        case None:
            return _plain(spec.theta, spec.rotated_dim), 1.0
        case LinearScaling(factor):
            return _plain(spec.theta, spec.rotated_dim) / factor, 1.0
        case DynamicScaling() as scaling:
            return _dynamic(spec, scaling, max_model_len), 1.0
        case YarnScaling() as scaling:
            return _yarn(spec, scaling), scaling.attention_factor
        case Llama3Scaling() as scaling:
            return _llama3(_plain(spec.theta, spec.rotated_dim), scaling), 1.0
        case LongScaling() as scaling:
            is_long = max_model_len > scaling.original_len
            factors = torch.tensor(
                scaling.long_factors if is_long else scaling.short_factors, dtype=torch.float32
            )
            return 1.0 / (factors * _powers(spec.theta, spec.rotated_dim)), scaling.attention_factor


def _powers(theta: float, dim: int) -> Tensor:
    return torch.pow(theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / _powers(theta, dim)


def _dynamic(spec: RopeSpec, scaling: DynamicScaling, max_model_len: int) -> Tensor:
    dim = spec.rotated_dim
    stretch = max(max_model_len, scaling.original_len) / scaling.original_len
    theta = spec.theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (dim / (dim - 2))
    return _plain(theta, dim)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    is_long = wavelengths > scaling.original_len / low
    is_short = wavelengths < scaling.original_len / high
    blend = (scaling.original_len / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return torch.where(
        is_long, frequencies / scaling.factor, torch.where(is_short, frequencies, blended)
    )


def _yarn(spec: RopeSpec, scaling: YarnScaling) -> Tensor:
    """Dimensions that turn often within the original context are kept,
    those that turn rarely are interpolated."""
    dim, powers = spec.rotated_dim, _powers(spec.theta, spec.rotated_dim)

    def dimension_of(num_rotations: float) -> float:
        length = scaling.original_len / (num_rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(spec.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # as the reference avoids a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep
