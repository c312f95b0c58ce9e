"""Reference mixtures of experts: one token and one of its experts at a time."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from quire.kernels.experts import check_choice, count_experts
from quire.kernels.interface import ExpertChoice, PackedLinear
from quire.kernels.reference import linear
from quire.kernels.reference.linear import ReferenceLinear, ReferenceQuantizedLinear
from quire.kernels.reference.sampling import best_first
from quire.program.operations import Gating, Routing


def choose_experts(logits: Tensor, routing: Routing) -> ExpertChoice:
    """See `Kernels.choose_experts`."""
    check_choice(logits, routing)
    shape = (logits.shape[0], routing.num_chosen)
    ids = torch.zeros(shape, dtype=torch.int64)
    weights = torch.full(shape, torch.nan)
    for i, row in enumerate(logits):
        if row.isfinite().all():
            ids[i] = best_first(row, routing.num_chosen)
            shares = torch.exp(row - row.max())
            chosen = shares[ids[i]]
            weights[i] = chosen / (chosen if routing.is_normalised else shares).sum(-1)
    return ExpertChoice(ids, weights)


def apply_experts(
    x: Tensor, up: PackedLinear, down: PackedLinear, choice: ExpertChoice, activation: Gating
) -> Tensor:
    """See `Kernels.apply_experts`."""
    num_experts = count_experts(x, up, down, choice)
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        row = x[t : t + 1]
        total = torch.zeros(1, x.shape[1])
        for expert, weight in zip(choice.ids[t].tolist(), choice.weights[t], strict=True):
            if 0 <= expert < num_experts:
                inner = linear.gated_linear(row, _part(up, expert, num_experts), activation)
                result = linear.linear(inner, _part(down, expert, num_experts), out_dtype="float32")
                total += weight * result
        out[t] = total[0].to(x.dtype)
    return out


def _part(weight: PackedLinear, index: int, count: int) -> PackedLinear:
    """Return the part of one expert."""
    size = weight.num_outputs // count
    rows = slice(index * size, (index + 1) * size)
    if isinstance(weight, ReferenceLinear):
        bias = None if weight.bias is None else weight.bias[rows]
        return ReferenceLinear(weight.weight[rows], bias, size, weight.num_inputs)
    if not isinstance(weight, ReferenceQuantizedLinear):
        raise TypeError(
            f"experts: the weights were packed by another back end ({type(weight).__name__})"
        )
    whole = weight.weight
    part = dataclasses.replace(
        whole,
        values=whole.values[rows],
        scales=whole.scales[rows],
        offsets=None if whole.offsets is None else whole.offsets[rows],
    )
    bias = None if weight.bias is None else weight.bias[rows]
    return ReferenceQuantizedLinear(part, bias, size, weight.num_inputs)
