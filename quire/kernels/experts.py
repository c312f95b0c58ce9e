"""What every back end checks of weights that stack those of experts, or of heads: see
`Kernels.choose_experts`, `apply_experts` and `head_linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.interface import ExpertChoice, PackedLinear
from quire.program.operations import Routing


def check_choice(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> None:
    """Raise ValueError unless experts can be chosen by float32 logits [T, E] and a bias [E]."""
    fits = logits.dim() == 2 and logits.shape[1] == routing.num_experts
    if logits.dtype != torch.float32 or not fits or not routing.is_possible:
        raise ValueError(
            f"cannot choose {routing.num_chosen} of {routing.num_experts} experts "
            f"({routing.num_groups_chosen} of {routing.num_groups} groups) by logits "
            f"{logits.dtype} {list(logits.shape)}"
        )
    if bias is None:
        return
    if routing.scoring != "sigmoid":
        raise ValueError("a bias is for experts that are chosen by sigmoids")
    if bias.dtype != torch.float32 or bias.shape != (routing.num_experts,):
        raise ValueError(
            f"expected a bias float32 [{routing.num_experts}], got {bias.dtype} {list(bias.shape)}"
        )


def check_heads(x: Tensor, weight: PackedLinear) -> int:
    """Count the heads of x [T, heads, K + rest]; ValueError unless a weight [heads * N, K] fits."""
    fits = x.dim() == 3 and x.is_contiguous() and weight.num_inputs <= x.shape[2]
    if not fits or not x.shape[1] or weight.num_outputs % x.shape[1]:
        raise ValueError(
            f"head_linear: x is {list(x.shape)}; expected [T, heads, K + rest] for a weight "
            f"[{weight.num_outputs}, {weight.num_inputs}] of all heads"
        )
    return x.shape[1]


def count_experts(x: Tensor, up: PackedLinear, down: PackedLinear, choice: ExpertChoice) -> int:
    """Count the experts that two weights stack; ValueError or TypeError unless all fits."""
    hidden, inner = up.num_inputs, down.num_inputs
    count, rest = divmod(up.num_outputs, 2 * inner)
    if rest or count * hidden != down.num_outputs:
        raise ValueError(
            f"expected experts up [E * 2 * F, H] and down [E * H, F], got [{up.num_outputs}, "
            f"{hidden}] and [{down.num_outputs}, {inner}]"
        )
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"experts: x is {list(x.shape)}; expected [T, {hidden}]")
    ids, weights = choice.ids, choice.weights
    if ids.dtype != torch.int64 or weights.dtype != torch.float32:
        raise TypeError(
            f"experts: expected int64 ids and float32 weights, got {ids.dtype} and {weights.dtype}"
        )
    fits = ids.dim() == 2 and ids.shape[0] == x.shape[0] and weights.shape == ids.shape
    if not fits or not ids.is_contiguous() or not weights.is_contiguous():
        raise ValueError(
            f"experts: expected ids and weights [T, k], got {list(ids.shape)} and "
            f"{list(weights.shape)}"
        )
    return count
