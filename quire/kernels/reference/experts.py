"""Reference mixtures of experts: one token and one of its experts at a time."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from quire.kernels.experts import check_choice, check_heads, count_experts
from quire.kernels.interface import ExpertChoice, PackedLinear
from quire.kernels.lora import ExpertAdapters
from quire.kernels.reference import elementwise, linear, lora
from quire.kernels.reference.linear import ReferenceLinear, ReferenceQuantizedLinear
from quire.kernels.reference.sampling import best_first
from quire.program.operations import Gating, Routing


def choose_experts(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> ExpertChoice:
    """See `Kernels.choose_experts`."""
    check_choice(logits, routing, bias)
    shape = (logits.shape[0], routing.num_chosen)
    ids = torch.zeros(shape, dtype=torch.int64)
    weights = torch.full(shape, torch.nan)
    for i, row in enumerate(logits):
        if row.isfinite().all():
            is_sigmoid = routing.scoring == "sigmoid"
            scores = 1.0 / (1.0 + torch.exp(-row)) if is_sigmoid else row
            values = scores if bias is None else scores + bias
            ids[i] = best_first(_in_best_groups(values, routing), routing.num_chosen)
            if is_sigmoid:
                weights[i] = _sigmoid_shares(scores[ids[i]], routing)
            else:
                weights[i] = _softmax_shares(row, ids[i], routing)
    return ExpertChoice(ids, weights * routing.factor)


def _in_best_groups(values: Tensor, routing: Routing) -> Tensor:
    """Return values [E], those of groups that are not among the best as minus infinity."""
    groups = values.view(routing.num_groups, -1)
    best = groups.topk(1 if routing.group_value == "best" else 2).values.sum(-1)
    chosen = best_first(best, routing.num_groups_chosen)
    kept = torch.full_like(groups, -torch.inf)
    kept[chosen] = groups[chosen]
    return kept.view(-1)


def _softmax_shares(row: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    shares = torch.exp(row - row.max())
    chosen = shares[ids]
    return chosen / (chosen if routing.is_normalised else shares).sum(-1)


def _sigmoid_shares(chosen: Tensor, routing: Routing) -> Tensor:
    return chosen / (chosen.sum(-1) + 1e-20) if routing.is_normalised else chosen


def apply_experts(
    x: Tensor,
    up: PackedLinear,
    down: PackedLinear,
    choice: ExpertChoice,
    activation: Gating,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """See `Kernels.apply_experts`."""
    num_experts = count_experts(x, up, down, choice)
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        row = x[t : t + 1]
        total = torch.zeros(1, x.shape[1])
        for expert, weight in zip(choice.ids[t].tolist(), choice.weights[t], strict=True):
            if 0 <= expert < num_experts:
                products = linear.linear(row, part(up, expert, num_experts), out_dtype="float32")
                _adapt(products[0], row[0], adapters, t, expert, is_up=True)
                inner = elementwise.gated(products, activation).to(x.dtype)
                result = linear.linear(inner, part(down, expert, num_experts), out_dtype="float32")
                _adapt(result[0], inner[0], adapters, t, expert, is_up=False)
                total += weight * result
        out[t] = total[0].to(x.dtype)
    return out


def _adapt(
    y: Tensor, x: Tensor, adapters: ExpertAdapters | None, row: int, expert: int, *, is_up: bool
) -> None:
    """Add what a token's adapter adds to an expert's outputs y, float32, of x."""
    if adapters is None:
        return
    number = adapters.up if is_up else adapters.down
    weight = lora.weight_of(adapters.step, row, number)
    if weight is not None:
        lora.add_to_row(y, x, weight, expert * len(y))


def head_linear(x: Tensor, weight: PackedLinear) -> Tensor:
    """See `Kernels.head_linear`."""
    num_heads, num_inputs = check_heads(x, weight), weight.num_inputs
    found = [
        linear.linear(x[:, head, :num_inputs].contiguous(), part(weight, head, num_heads))
        for head in range(num_heads)
    ]
    return torch.cat([torch.stack(found, dim=1), x[..., num_inputs:]], dim=-1)


def part(weight: PackedLinear, index: int, count: int) -> PackedLinear:
    """Return the part of one expert, or of one head."""
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
