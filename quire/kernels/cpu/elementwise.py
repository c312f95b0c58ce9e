"""Norms, activations, rotary embedding and embedding lookup on the CPU: checks,
and calls into the extension."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu import _native
from quire.kernels.cpu.checks import (
    address,
    float_code,
    heads_address,
    indices_address,
    require,
)
from quire.kernels.cpu.linear import PackedTable
from quire.kernels.interface import EmbeddingTable
from quire.program.operations import Activation, Gating, activation_code, gating_code


def embedding(token_ids: Tensor, table: EmbeddingTable) -> Tensor:
    """Gather rows of `table [V, H]`, a tensor or a `PackedTable`;
    an id outside it raises IndexError."""
    num_tokens, width = token_ids.numel(), table.shape[-1]
    out = torch.empty((num_tokens, width), dtype=table.dtype)
    _native.embedding(
        native_lookup(table),
        indices_address(token_ids, "token_ids", num_tokens),
        num_tokens,
        out.data_ptr(),
    )
    return out


def native_lookup(table: EmbeddingTable) -> _native.Lookup:
    """Return the extension's view of a table; does not keep its memory alive."""
    if isinstance(table, PackedTable):
        return _native.Lookup(table.weight.native)
    if not isinstance(table, Tensor):
        raise TypeError(f"embedding: the table is of another back end ({type(table).__name__})")
    require(table.dim() == 2, "embedding: expected table [V, H]", table)
    return _native.Lookup(address(table, "table"), float_code(table, "table"), *table.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """See `Kernels.rms_norm`; the weight may be float32 beside bfloat16 x,
    and the other way round."""
    return _rms_norm(x, None, weight, eps, weight_offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `Kernels.add_rms_norm`: one pass over the rows."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: x is {x.dtype} {list(x.shape)}, residual {residual.dtype} "
            f"{list(residual.shape)}"
        )
    return _rms_norm(x, residual, weight, eps, weight_offset)


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and that sum; without a residual the norm of x, and x."""
    width = _norm_width(x, weight)
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    first = 0 if residual is None else address(residual, "residual")
    second = 0 if residual is None else total.data_ptr()
    codes = float_code(x, "x"), float_code(weight, "weight")
    _native.rms_norm(
        address(x, "x"), first, weight.data_ptr(), second, out.data_ptr(), *codes,
        x.numel() // width, width, eps, weight_offset,
    )  # fmt: skip
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Kernels.layer_norm`."""
    width = _norm_width(x, weight)
    if bias is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
        raise ValueError(
            f"layer_norm: weight is {weight.dtype} [{width}], bias {bias.dtype} {list(bias.shape)}"
        )
    out = torch.empty_like(x)
    _native.layer_norm(
        address(x, "x"),
        weight.data_ptr(),
        0 if bias is None else address(bias, "bias"),
        out.data_ptr(),
        float_code(x, "x"),
        float_code(weight, "weight"),
        x.numel() // width,
        width,
        eps,
    )
    return out


def _norm_width(x: Tensor, weight: Tensor) -> int:
    """H of x [..., H] and weight [H], both fit to be read."""
    if weight.dim() != 1 or x.dim() < 1 or x.shape[-1] != weight.shape[0] or weight.shape[0] == 0:
        raise ValueError(
            f"norm: x is {list(x.shape)} and weight {list(weight.shape)}; expected [..., H] and [H]"
        )
    address(weight, "weight")
    return weight.shape[0]


def is_finite(x: Tensor) -> bool:
    """Return whether a tensor of any shape holds no NaN and no infinity."""
    return _native.is_finite(address(x, "x"), float_code(x, "x"), x.numel())


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Elementwise activation of a tensor of any shape."""
    out = torch.empty_like(x)
    _native.activate(
        address(x, "x"), out.data_ptr(), float_code(x, "x"), activation_code(activation), x.numel()
    )
    return out


def gated(gate_up: Tensor, activation: Gating) -> Tensor:
    """`activation(gate) * up`: gate_up [T, 2 * F], gate first -> [T, F]."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gated: gate_up is {list(gate_up.shape)}; expected [T, 2 * F]")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype)
    source, code = address(gate_up, "gate_up"), float_code(gate_up, "gate_up")
    _native.gated(source, out.data_ptr(), code, gating_code(activation), num_rows, width)
    return out


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x [T, H] by the sigmoid of gate [T, 1], rounded once."""
    if x.dim() != 2 or gate.shape != (x.shape[0], 1) or gate.dtype != x.dtype:
        raise ValueError(
            f"gate_rows: x is {x.dtype} {list(x.shape)} and the gate {gate.dtype} "
            f"{list(gate.shape)}; expected [T, H] and [T, 1] of one dtype"
        )
    out = torch.empty_like(x)
    code = float_code(x, "x")
    _native.gate_rows(address(x, "x"), address(gate, "gate"), out.data_ptr(), code, *x.shape)
    return out


def rope(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    start: int = 0,
) -> None:
    """See `Kernels.rope`; a position outside the table raises ValueError."""
    require(
        cos_sin.dim() == 3 and cos_sin.shape[1] == 2,
        "rope: expected cos_sin [P, 2, R / 2]",
        cos_sin,
    )
    if cos_sin.dtype != torch.float32:
        raise TypeError(f"rope: cos_sin is {cos_sin.dtype}; expected float32")
    data = heads_address(x, "x")
    num_tokens, num_heads, head_size = x.shape
    num_positions, _, half = cos_sin.shape
    if not 0 <= start <= head_size - 2 * half:
        raise ValueError(
            f"rope: {2 * half} rotated dimensions from {start} on in a head of {head_size}"
        )
    _native.rope(
        data,
        indices_address(positions, "positions", num_tokens),
        address(cos_sin, "cos_sin"),
        float_code(x, "x"),
        num_tokens,
        x.stride(0),
        num_heads,
        head_size,
        half,
        num_positions,
        interleaved,
        start,
    )
