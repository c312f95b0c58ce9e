"""Triton's mixtures of experts against the reference, and the bits that company may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import thorough
from torch import Tensor

from quire.kernels import load
from quire.kernels.interface import ExpertChoice, Kernels, QuantizedWeight
from quire.program.operations import Routing

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
    integers = QuantizedWeight(
        torch.zeros(16, 4, dtype=torch.int8), torch.ones(16, 1), None, 8, 4, "int8"
    )
    for other in (REFERENCE.pack_linear(draw(2 * 8, 4)), kernels.pack_quantized(integers)):
        with pytest.raises(TypeError, match="floating-point weights, packed by"):
            kernels.apply_experts(draw(3, 4).to(device), other, down, _choice(device), "silu")


def _choice(device: torch.device) -> ExpertChoice:
    return there(REFERENCE.choose_experts(draw(3, 2), Routing(2, 1, True)), device)
