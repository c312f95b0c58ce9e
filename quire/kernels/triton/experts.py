"""Mixtures of experts on a GPU: calls into the kernels of `expert_gemm`. They have not run on a GPU
yet."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.experts import check_choice, check_heads, count_experts
from quire.kernels.interface import ExpertChoice, PackedLinear
from quire.kernels.lora import ExpertAdapters
from quire.kernels.triton.activation import NO_ACTIVATION
from quire.kernels.triton.checks import check_floats, launch_options
from quire.kernels.triton.expert_gemm import (
    choose_kernel,
    combine_kernel,
    count_kernel,
    expert_kernel,
    integer_expert_kernel,
    place_kernel,
)
from quire.kernels.triton.integer_gemm import INPUT_CODES
from quire.kernels.triton.integer_linear import IntegerLinear, quantize_rows
from quire.kernels.triton.linear import FloatLinear
from quire.program.operations import Gating, Routing, gating_code

_SORT_BLOCK = 2048
_COMBINE_BLOCK = 1024


def choose_experts(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> ExpertChoice:
    """See `Kernels.choose_experts`."""
    check_choice(logits, routing, bias)
    check_floats(logits, "logits")
    (num_tokens, num_experts), count = logits.shape, routing.num_chosen
    ids = torch.empty((num_tokens, count), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, count), dtype=torch.float32, device=logits.device)
    if num_tokens:
        choose_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, ids, weights, num_experts, routing.factor,
            COUNT=count, COUNT_PADDED=triton.next_power_of_2(count),
            BLOCK=triton.next_power_of_2(num_experts), IS_NORMALISED=routing.is_normalised,
            IS_SIGMOID=routing.scoring == "sigmoid", HAS_BIAS=bias is not None,
            GROUPS=routing.num_groups, GROUPS_CHOSEN=routing.num_groups_chosen,
            GROUPS_PADDED=triton.next_power_of_2(routing.num_groups),
            SUMS_BEST_TWO=routing.group_value == "best_two", **launch_options(1),
        )  # fmt: skip
    return ExpertChoice(ids, weights)


def apply_experts(
    x: Tensor,
    up: PackedLinear,
    down: PackedLinear,
    choice: ExpertChoice,
    activation: Gating,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """See `Kernels.apply_experts`; weights of floats have x's dtype. Takes no adapters, as no
    program of this back end does."""
    assert adapters is None, "this back end takes no adapters"
    check_floats(x, "experts: x")
    num_experts = count_experts(x, up, down, choice)
    up, down = (arrange_experts(each, num_experts) for each in (up, down))
    out = torch.empty_like(x)
    if not x.shape[0]:
        return out
    num_pairs, hidden, inner = choice.ids.numel(), up.num_inputs, down.num_inputs
    places = sort_pairs(choice.ids, num_experts)
    gated = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    _launch(x, up, num_experts, places, gated, gating_code(activation))
    partial = torch.empty((num_pairs, hidden), dtype=torch.float32, device=x.device)
    _launch(gated, down, num_experts, places, partial, NO_ACTIVATION)
    combine_kernel[(x.shape[0], triton.cdiv(hidden, _COMBINE_BLOCK))](
        partial, choice.ids, choice.weights, out, num_experts, hidden,
        NUM_CHOICES=choice.ids.shape[1],
        BLOCK=min(_COMBINE_BLOCK, triton.next_power_of_2(hidden)), **launch_options(4),
    )  # fmt: skip
    return out


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, int32 [P], and where each expert's begin, int32 [E + 1];
    see `expert_gemm`.

    Ids outside 0 ... E - 1 are in neither: as many places at the end are left undefined.
    """
    num_pairs = ids.numel()
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    block = min(_SORT_BLOCK, triton.next_power_of_2(num_pairs))
    count_kernel[(num_experts,)](ids, counts, num_pairs, BLOCK=block, **launch_options(4))
    place_kernel[(num_experts,)](
        ids, counts, starts, order, num_pairs, num_experts,
        EXPERTS=triton.next_power_of_2(num_experts), BLOCK=block, **launch_options(4),
    )  # fmt: skip
    return order, starts


def arrange_experts(weight: PackedLinear, num_experts: int) -> FloatLinear | IntegerLinear:
    """Bring a weight into the order in which experts are read, once."""
    if isinstance(weight, IntegerLinear):
        weight.arrange(num_experts)
    elif not isinstance(weight, FloatLinear):
        raise TypeError(
            f"experts: the weight was packed by another back end ({type(weight).__name__})"
        )
    return weight


def head_linear(x: Tensor, weight: PackedLinear) -> Tensor:
    """See `Kernels.head_linear`: heads are experts that every token chooses."""
    check_floats(x, "head_linear: x")
    num_heads, weight = check_heads(x, weight), _floats(weight)
    num_tokens, num_inputs = x.shape[0], weight.num_inputs
    num_outputs = weight.num_outputs // num_heads
    places = torch.arange(num_tokens * num_heads, dtype=torch.int32, device=x.device)
    order = places.view(num_tokens, num_heads).T.contiguous().view(-1)
    starts = torch.arange(num_heads + 1, dtype=torch.int32, device=x.device) * num_tokens
    rows = x[:, :, :num_inputs].transpose(0, 1).contiguous().view(-1, num_inputs)
    out = torch.empty((len(order), num_outputs), dtype=torch.float32, device=x.device)
    if num_tokens:
        _launch(rows, weight, num_heads, (order, starts), out, NO_ACTIVATION)
    products = out.view(num_tokens, num_heads, num_outputs).to(x.dtype)
    return torch.cat([products, x[:, :, num_inputs:]], dim=-1)


def _floats(weight: PackedLinear) -> FloatLinear:
    if not isinstance(weight, FloatLinear) or weight.bias is not None:
        raise TypeError(
            "head_linear: expected a floating-point weight without a bias, packed by this back "
            f"end, not {type(weight).__name__}"
        )
    return weight


def _launch(
    x: Tensor,
    weight: FloatLinear | IntegerLinear,
    num_experts: int,
    places: tuple[Tensor, Tensor],
    out: Tensor,
    activation: int,
) -> None:
    (order, starts), tuning = places, weight.tuning
    num_tiles = order.numel() // tuning.block_m + num_experts
    grid = (num_tiles, triton.cdiv(weight.num_outputs // num_experts, tuning.block_n))
    sizes = {
        "NUM_CHOICES": order.numel() // x.shape[0], "BLOCK_M": tuning.block_m,
        "BLOCK_N": tuning.block_n, "ACTIVATION": activation, "HAS_BIAS": weight.bias is not None,
        **launch_options(tuning.num_warps, tuning.num_stages),
    }  # fmt: skip
    if isinstance(weight, FloatLinear):
        if x.dtype != weight.weight.dtype:
            raise TypeError(f"experts: x is {x.dtype} but the weights {weight.weight.dtype}")
        expert_kernel[grid](
            x, weight.weight, weight.weight if weight.bias is None else weight.bias, out, order,
            starts, num_experts, out.shape[1], weight.num_inputs, BLOCK_K=tuning.block_k, **sizes,
        )  # fmt: skip
        return
    inputs, input_scales = (
        (x, weight.scales)
        if weight.activations == "float"
        else quantize_rows(x, weight.activations)
    )
    integer_expert_kernel[grid](
        inputs, input_scales, weight.values, weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        weight.scales if weight.bias is None else weight.bias, out, order, starts, num_experts,
        out.shape[1], weight.num_inputs, GROUP=weight.group_size, BLOCK_K=weight.block_k,
        BITS=weight.bits, INPUTS=INPUT_CODES[weight.activations], IS_FP8=weight.is_fp8,
        HAS_FP8=weight.options.has_fp8, IS_MXFP4=weight.is_mxfp4,
        HAS_OFFSETS=weight.offsets is not None, IS_RAW=weight.is_raw, **sizes,
    )  # fmt: skip
