"""Reference norms, activations, rotary embedding and gathers:
one line of torch per line of mathematics."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.interface import EmbeddingTable
from quire.program.operations import Activation, Gating


def embedding(token_ids: Tensor, table: EmbeddingTable) -> Tensor:
    """`table[token_ids]`; an id outside the table raises IndexError."""
    if not isinstance(table, Tensor):
        raise TypeError(f"embedding: the table is of another back end ({type(table).__name__})")
    if token_ids.numel() and (int(token_ids.min()) < 0 or int(token_ids.max()) >= table.shape[0]):
        raise IndexError(f"embedding: a token id is outside the table of {table.shape[0]} rows")
    return table[token_ids]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; computed in float32,
    rounded once."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + weight_offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Round the sum to x's dtype before it is normalised, as if it were two operations."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps, weight_offset=weight_offset), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Ba, Kiros and Hinton, "Layer Normalization", 2016; biased variance, in float32."""
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    normed = (
        centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    )
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def is_finite(x: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    return bool(torch.isfinite(x).all())


def finite_rows(x: Tensor) -> Tensor:
    """Return in which rows of [T, H] no element is NaN or infinite."""
    return torch.isfinite(x).all(dim=-1)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Elementwise, in float32, rounded once."""
    return _activation(x.float(), activation).to(x.dtype)


def gated(gate_up: Tensor, activation: Gating) -> Tensor:
    """`activation(gate) * up`, in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "clamped_swish":
        gate = gate.clamp(max=7.0)
        swish = gate / (1.0 + torch.exp(-1.702 * gate))
        return (swish * (up.clamp(-7.0, 7.0) + 1.0)).to(gate_up.dtype)
    return (_activation(gate, activation) * up).to(gate_up.dtype)


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x [T, H] by the sigmoid of gate [T, 1] in float32, rounded once."""
    return (x.float() * (1.0 / (1.0 + torch.exp(-gate.float())))).to(x.dtype)


def _activation(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if activation == "gelu_sigmoid":
        return x * torch.sigmoid(1.702 * x)
    raise ValueError(f"activation {activation!r} is not one of silu, gelu, gelu_tanh, gelu_sigmoid")


def rope(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    start: int = 0,
) -> None:
    """Su et al., "RoFormer", 2021: rotate pairs of the dimensions of x from `start` on in place,
    in float32."""
    half = cos_sin.shape[2]
    cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)  # [T, 1, half] each
    rotated = x[..., start : start + 2 * half]
    wide = rotated.float()
    first, second = (
        (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    )
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    rotated.copy_(turned.to(x.dtype))
