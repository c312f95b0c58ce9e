"""Triton's mixtures of experts against the reference, and the bits that company may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import thorough
from quantized_checkpoints import mxfp4_weight as mxfp4
from routing_cases import ROUTINGS, chosen_by_hand, draw_case
from torch import Tensor

from quire.kernels import load
from quire.kernels.interface import ExpertChoice, Kernels, QuantizedWeight
from quire.program.operations import Routing
from quire.quant.formats import IntegerFormat
from quire.quant.rounding import quantize

REFERENCE = load("reference")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def there(choice: ExpertChoice, device: torch.device) -> ExpertChoice:
    return ExpertChoice(choice.ids.to(device), choice.weights.to(device))


@pytest.mark.parametrize("is_normalised", [False, True])
def test_choices(kernels: Kernels, device: torch.device, is_normalised: bool) -> None:
    logits, routing = draw(7, 11), Routing(11, 3, is_normalised)
    logits[1] = 0.5  # equals: the lowest ids
    logits[2, 3:] = -1e4
    got = kernels.choose_experts(logits.to(device), routing)
    want = REFERENCE.choose_experts(logits, routing)
    assert torch.equal(got.ids.cpu(), want.ids) and got.ids[1].tolist() == [0, 1, 2]
    torch.testing.assert_close(got.weights.cpu(), want.weights, atol=1e-7, rtol=1e-6)
    logits[4, 10] = torch.inf
    weights = kernels.choose_experts(logits.to(device), routing).weights.cpu()
    assert weights.isnan().any(dim=1).tolist() == [False, False, False, False, True, False, False]


@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_of_groups_and_by_sigmoids(
    kernels: Kernels, device: torch.device, name: str
) -> None:
    logits, routing, bias = draw_case(name, 3)
    there_bias = None if bias is None else bias.to(device)
    got = kernels.choose_experts(logits.to(device), routing, there_bias)
    ids, weights = chosen_by_hand(logits, routing, bias)
    assert got.ids.tolist() == ids
    torch.testing.assert_close(got.weights.cpu(), weights, atol=1e-6, rtol=1e-5)


def test_equal_groups_go_to_the_lowest_ids(kernels: Kernels, device: torch.device) -> None:
    routing = Routing(12, 3, True, "sigmoid", 4, 2, "best_two")
    logits = torch.tensor([[0.0] * 12, [-1.0] * 3 + [2.0] * 9]).to(device)
    assert kernels.choose_experts(logits, routing).ids.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("num_tokens", "sizes", "count", "dtype"),
    [
        (23, (5, 24, 40), 2, torch.bfloat16),
        thorough(1, (8, 32, 16), 8, torch.bfloat16),
        thorough(40, (3, 70, 33), 1, torch.float32),
    ],
)
def test_it_agrees_with_the_reference_and_company_changes_no_bit(
    kernels: Kernels,
    device: torch.device,
    num_tokens: int,
    sizes: tuple[int, int, int],
    count: int,
    dtype: Any,
) -> None:
    num_experts, hidden, inner = sizes
    up = (draw(num_experts * 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (draw(num_experts * hidden, inner) / 4).to(dtype)
    x, logits = draw(num_tokens, hidden).to(dtype), draw(num_tokens, num_experts)
    logits[:, -2] -= 50.0  # hardly anyone's choice
    choice = REFERENCE.choose_experts(logits, Routing(num_experts, count, True))
    choice.ids[0, 0] = -1  # held elsewhere
    packed = kernels.pack_linear(up), kernels.pack_linear(down)
    ours = there(choice, device)
    got = kernels.apply_experts(x.to(device), *packed, ours, "silu")
    near = 2e-5 if dtype is torch.float32 else 2e-2
    plain = REFERENCE.pack_linear(up), REFERENCE.pack_linear(down)
    want = REFERENCE.apply_experts(x, *plain, choice, "silu")
    torch.testing.assert_close(got.cpu(), want, atol=near, rtol=near)
    few = slice(num_tokens // 2, num_tokens // 2 + 2)
    part = ExpertChoice(ours.ids[few].contiguous(), ours.weights[few].contiguous())
    assert torch.equal(kernels.apply_experts(x[few].to(device), *packed, part, "silu"), got[few])


def test_biases_are_those_of_the_expert(kernels: Kernels, device: torch.device) -> None:
    num_experts, hidden, inner = 3, 24, 12
    up, down = draw(num_experts * 2 * inner, hidden) / 4, draw(num_experts * hidden, inner) / 4
    x, choice = draw(9, hidden), REFERENCE.choose_experts(draw(9, 3), Routing(3, 2, True))
    outs = []
    for each in (kernels, REFERENCE):
        gate_up, last = (each.pack_linear(weight, draw(weight.shape[0])) for weight in (up, down))
        here = device if each is kernels else torch.device("cpu")
        found = each.apply_experts(x.to(here), gate_up, last, there(choice, here), "clamped_swish")
        outs.append(found.cpu())
    torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)


def _integers(weight: Tensor, form: str) -> QuantizedWeight:
    if form == "mxfp4":
        return mxfp4(weight)
    if form == "fp8":
        groups = weight.view(len(weight), -1, 8)
        scales = groups.abs().amax(-1) / 448
        values = (groups / scales[..., None]).view(weight.shape).to(torch.float8_e4m3fn)
        return QuantizedWeight(values, scales, None, 8, 8, "float")
    bits, size, activations = {
        "int8": (8, weight.shape[1], "int8"), "int4": (4, 8, "int8"), "W4A16": (4, 8, "float"),
    }[form]  # fmt: skip
    return quantize(weight, IntegerFormat(bits, size, activations))  # type: ignore[arg-type]


@pytest.mark.slow_except("3-int8")
@pytest.mark.parametrize("form", ["int8", "int4", "W4A16", "mxfp4", "fp8"])
@pytest.mark.parametrize("num_experts", [3, thorough(4)])
def test_integers_agree_with_the_reference_and_company_changes_no_bit(
    kernels: Kernels, device: torch.device, num_experts: int, form: str
) -> None:
    """Of an odd number of experts, nibbles of one would lie on both sides of the whole weight."""
    hidden, inner = 40, 24
    up, down = draw(num_experts * 2 * inner, hidden) / 4, draw(num_experts * hidden, inner) / 4
    x = draw(21, hidden).bfloat16().float()
    choice = REFERENCE.choose_experts(draw(21, num_experts), Routing(num_experts, 2, True))
    choice.ids[0, 0] = -1  # held elsewhere
    outs, ours = [], there(choice, device)
    for each in (kernels, REFERENCE):
        gate_up, last = (
            each.pack_quantized(_integers(weight, form), draw(weight.shape[0]))
            for weight in (up, down)
        )
        if each is kernels:
            got = each.apply_experts(x.to(device), gate_up, last, ours, "clamped_swish")
            few = slice(9, 12)
            part = ExpertChoice(ours.ids[few].contiguous(), ours.weights[few].contiguous())
            alone = each.apply_experts(x[few].to(device), gate_up, last, part, "clamped_swish")
            assert torch.equal(alone, got[few])
            outs.append(got.cpu())
        else:
            outs.append(each.apply_experts(x, gate_up, last, choice, "clamped_swish"))
    torch.testing.assert_close(*outs, atol=1e-2 if form.startswith("int") else 1e-4, rtol=1e-3)


def test_a_weight_can_be_arranged_and_read_whole_again(
    kernels: Kernels, device: torch.device
) -> None:
    whole = draw(3 * 10, 16)
    packed = kernels.pack_quantized(_integers(whole, "int4"))
    x = draw(4, 16).to(device)
    before = kernels.linear(x, packed)
    packed.arrange(3)  # type: ignore[attr-defined]
    assert torch.equal(kernels.linear(x, packed), before)


def test_pairs_are_sorted_stably(kernels: Kernels, device: torch.device) -> None:
    from quire.kernels.triton.experts import sort_pairs

    ids = torch.randint(-1, 6, (2500, 2), generator=torch.Generator().manual_seed(1))
    ids[ids == 3] = 2  # nobody's choice
    order, starts = (each.cpu() for each in sort_pairs(ids.to(device), 5))
    flat = ids.flatten()
    known = ((flat >= 0) & (flat < 5)).nonzero().flatten()
    assert torch.equal(order[: len(known)].long(), known[flat[known].sort(stable=True).indices])
    assert starts.tolist() == [0, *torch.bincount(flat[known], minlength=5).cumsum(0).tolist()]


def test_what_does_not_fit_is_refused(kernels: Kernels, device: torch.device) -> None:
    up, down = kernels.pack_linear(draw(2 * 8, 4)), kernels.pack_linear(draw(2 * 4, 4))
    with pytest.raises(ValueError, match=r"expected experts up \[E \* 2 \* F, H\]"):
        kernels.apply_experts(draw(2, 4).to(device), down, down, _choice(device), "silu")
    with pytest.raises(ValueError, match="cannot choose 5 of 4 experts"):
        kernels.choose_experts(draw(2, 4).to(device), Routing(4, 5, True))
    with pytest.raises(ValueError, match=r"expected ids and weights \[T, k\]"):
        kernels.apply_experts(draw(2, 4).to(device), up, down, _choice(device), "silu")
    with pytest.raises(TypeError, match="packed by another back end"):
        other = REFERENCE.pack_linear(draw(2 * 8, 4))
        kernels.apply_experts(draw(3, 4).to(device), other, down, _choice(device), "silu")
    wide = kernels.pack_linear(draw(2 * 8, 4).bfloat16())
    with pytest.raises(TypeError, match=r"x is torch\.float32 but the weights torch\.bfloat16"):
        kernels.apply_experts(draw(3, 4).to(device), wide, down, _choice(device), "silu")


def _choice(device: torch.device) -> ExpertChoice:
    return there(REFERENCE.choose_experts(draw(3, 2), Routing(2, 1, True)), device)
