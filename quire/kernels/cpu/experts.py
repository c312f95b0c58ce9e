"""Weights that stack others, on the CPU: mixtures of experts, all chosen ones of all tokens in two
parallel regions (csrc/cpu/experts.cpp), and weights of heads (csrc/cpu/head_linear.cpp)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cpu import _native
from quire.kernels.cpu.checks import address, float_code
from quire.kernels.cpu.linear import CpuLinear
from quire.kernels.cpu.lora import native_adapters
from quire.kernels.cpu.paging import PagedLinear, naming_files
from quire.kernels.experts import check_choice, check_heads, count_experts
from quire.kernels.interface import ExpertChoice, PackedLinear
from quire.kernels.lora import ExpertAdapters
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


def native_routing(routing: Routing, bias: Tensor | None = None) -> _native.ExpertRouting:
    """Return a routing as native callers take it; it does not keep the bias alive."""
    return _native.ExpertRouting(
        num_experts=routing.num_experts,
        num_chosen=routing.num_chosen,
        is_normalised=routing.is_normalised,
        is_sigmoid=routing.scoring == "sigmoid",
        num_groups=routing.num_groups,
        num_groups_chosen=routing.num_groups_chosen,
        sums_best_two=routing.group_value == "best_two",
        factor=routing.factor,
        bias=0 if bias is None else address(bias, "the routers' bias"),
    )


def choose_experts(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> ExpertChoice:
    """See `Kernels.choose_experts`."""
    check_choice(logits, routing, bias)
    shape = (logits.shape[0], routing.num_chosen)
    ids, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
    _native.choose_experts(
        native_routing(routing, bias),
        address(logits, "logits"),
        logits.shape[0],
        ids.data_ptr(),
        weights.data_ptr(),
    )
    return ExpertChoice(ids, weights)


def apply_experts(
    x: Tensor,
    up: PackedLinear,
    down: PackedLinear,
    choice: ExpertChoice,
    activation: Gating,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """See `Kernels.apply_experts`; widths as `reasons_against` says."""
    num_experts = count_experts(x, up, down, choice)
    weights = native_experts(up, down)
    out = torch.empty_like(x)
    natives, of_token = ([], 0) if adapters is None else native_adapters(adapters.step, x.shape[0])
    with naming_files():
        _native.apply_experts(
            weights.up,
            weights.down,
            num_experts,
            gating_code(activation),
            address(choice.ids, "ids"),
            address(choice.weights, "weights"),
            choice.ids.shape[1],
            address(x, "x"),
            float_code(x, "x"),
            x.shape[0],
            out.data_ptr(),
            weights.pool,
            weights.number,
            natives,
            of_token,
            -1 if adapters is None else adapters.up,
            -1 if adapters is None else adapters.down,
        )
    return out


class NativeExperts(NamedTuple):
    """A layer's experts as native callers take them."""

    up: _native.LinearWeight
    down: _native.LinearWeight
    pool: _native.ExpertPool | None
    number: int


def native_experts(up: PackedLinear, down: PackedLinear) -> NativeExperts:
    """TypeError unless both are this back end's, in memory or in one pool."""
    if isinstance(up, PagedLinear) and isinstance(down, PagedLinear):
        if up.home is None or up.home != down.home:
            raise ValueError("experts: the weights belong to no pool, or to two")
        return NativeExperts(up.native, down.native, up.home.pool.native, up.home.number)
    for weight in (up, down):
        if not isinstance(weight, CpuLinear):
            raise TypeError(
                f"experts: the weight was packed by another back end ({type(weight).__name__})"
            )
    assert isinstance(up, CpuLinear) and isinstance(down, CpuLinear)
    return NativeExperts(up.native, down.native, None, 0)


def head_linear(x: Tensor, weight: PackedLinear) -> Tensor:
    """See `Kernels.head_linear`; a multiple of `PANEL` outputs for each head."""
    num_heads = check_heads(x, weight)
    if not isinstance(weight, CpuLinear):
        raise TypeError(
            f"head_linear: the weight was packed by another back end ({type(weight).__name__})"
        )
    num_tokens, _, size = x.shape
    out_size = weight.num_outputs // num_heads + size - weight.num_inputs
    out = torch.empty((num_tokens, num_heads, out_size), dtype=x.dtype)
    _native.head_linear(
        weight.native,
        num_heads,
        size,
        address(x, "x"),
        float_code(x, "x"),
        num_tokens,
        out.data_ptr(),
    )
    return out
