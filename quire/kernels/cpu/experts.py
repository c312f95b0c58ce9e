"""Mixtures of experts on the CPU: all chosen experts of all tokens in two parallel regions
(csrc/cpu/experts.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu import _native
from quire.kernels.cpu.checks import address, float_code
from quire.kernels.cpu.linear import CpuLinear
from quire.kernels.experts import check_choice, count_experts
from quire.kernels.interface import ExpertChoice, PackedLinear
from quire.program.operations import Gating, Routing, gating_code

PANEL = 16
"""Outputs of a packed weight that only go together (csrc/cpu/weight.hpp)."""


def reasons_against(hidden: int, inner: int) -> list[str]:
    """Say why experts of these widths cannot be computed: each must begin with a panel."""
    reasons = []
    if hidden % PANEL:
        reasons.append(f"has experts for hidden sizes that {PANEL} divides, not for {hidden}")
    if 2 * inner % PANEL:
        reasons.append(f"has experts of widths that {PANEL // 2} divides, not of {inner}")
    return reasons


def choose_experts(logits: Tensor, routing: Routing) -> ExpertChoice:
    """See `Kernels.choose_experts`."""
    check_choice(logits, routing)
    shape = (logits.shape[0], routing.num_chosen)
    ids, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
    _native.choose_experts(
        address(logits, "logits"),
        logits.shape[0],
        routing.num_experts,
        routing.num_chosen,
        routing.is_normalised,
        ids.data_ptr(),
        weights.data_ptr(),
    )
    return ExpertChoice(ids, weights)


def apply_experts(
    x: Tensor, up: PackedLinear, down: PackedLinear, choice: ExpertChoice, activation: Gating
) -> Tensor:
    """See `Kernels.apply_experts`; widths as `reasons_against` says."""
    num_experts = count_experts(x, up, down, choice)
    for weight in (up, down):
        if not isinstance(weight, CpuLinear):
            raise TypeError(
                f"experts: the weight was packed by another back end ({type(weight).__name__})"
            )
    assert isinstance(up, CpuLinear) and isinstance(down, CpuLinear)
    out = torch.empty_like(x)
    _native.apply_experts(
        up.native,
        down.native,
        num_experts,
        gating_code(activation),
        address(choice.ids, "ids"),
        address(choice.weights, "weights"),
        choice.ids.shape[1],
        address(x, "x"),
        float_code(x, "x"),
        x.shape[0],
        out.data_ptr(),
    )
    return out
