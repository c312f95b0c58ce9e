"""Triton's mixtures of experts against the reference, and the bits that company may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import thorough
from torch import Tensor

from quire.kernels.experts import ExpertChoice, ExpertKernels
from quire.kernels.interface import Kernels
from quire.kernels.reference.experts import ReferenceExperts

REFERENCE = ReferenceExperts()


@pytest.fixture
def experts(kernels: Kernels, device: torch.device) -> ExpertKernels:
    from quire.kernels.triton.experts import TritonExperts
    from quire.kernels.triton.tuning import tuning_for

    return TritonExperts(device, tuning_for(device))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def there(choice: ExpertChoice, device: torch.device) -> ExpertChoice:
    return ExpertChoice(choice.ids.to(device), choice.weights.to(device))


@pytest.mark.parametrize("is_normalised", [False, True])
def test_choices(experts: ExpertKernels, device: torch.device, is_normalised: bool) -> None:
    logits = draw(7, 11)
    logits[1] = 0.5  # equals: the lowest ids
    logits[2, 3:] = -1e4
    got = experts.choose(logits.to(device), 3, is_normalised=is_normalised)
    want = REFERENCE.choose(logits, 3, is_normalised=is_normalised)
    assert torch.equal(got.ids.cpu(), want.ids) and got.ids[1].tolist() == [0, 1, 2]
    torch.testing.assert_close(got.weights.cpu(), want.weights, atol=1e-7, rtol=1e-6)
    logits[4, 10] = torch.inf
    weights = experts.choose(logits.to(device), 3, is_normalised=is_normalised).weights.cpu()
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
    experts: ExpertKernels,
    device: torch.device,
    num_tokens: int,
    sizes: tuple[int, int, int],
    count: int,
    dtype: Any,
) -> None:
    num_experts, hidden, inner = sizes
    up, down = (
        (draw(num_experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (draw(num_experts, hidden, inner) / 4).to(dtype),
    )
    x, logits = draw(num_tokens, hidden).to(dtype), draw(num_tokens, num_experts)
    logits[:, -2] -= 50.0  # hardly anyone's choice
    choice = REFERENCE.choose(logits, count, is_normalised=True)
    choice.ids[0, 0] = -1  # held elsewhere
    packed, ours = experts.pack_experts(up, down), there(choice, device)
    got = experts.apply(x.to(device), packed, ours, "silu")
    near = 2e-5 if dtype is torch.float32 else 2e-2
    want = REFERENCE.apply(x, REFERENCE.pack_experts(up, down), choice, "silu")
    torch.testing.assert_close(got.cpu(), want, atol=near, rtol=near)
    few = slice(num_tokens // 2, num_tokens // 2 + 2)
    part = ExpertChoice(ours.ids[few].contiguous(), ours.weights[few].contiguous())
    assert torch.equal(experts.apply(x[few].to(device), packed, part, "silu"), got[few])
    assert packed.num_bytes == up.nbytes + down.nbytes and packed.num_experts == num_experts


def test_pairs_are_sorted_stably(experts: ExpertKernels, device: torch.device) -> None:
    from quire.kernels.triton.experts import sort_pairs

    ids = torch.randint(-1, 6, (2500, 2), generator=torch.Generator().manual_seed(1))
    ids[ids == 3] = 2  # nobody's choice
    order, starts = (each.cpu() for each in sort_pairs(ids.to(device), 5))
    flat = ids.flatten()
    known = ((flat >= 0) & (flat < 5)).nonzero().flatten()
    assert torch.equal(order[: len(known)].long(), known[flat[known].sort(stable=True).indices])
    assert starts.tolist() == [0, *torch.bincount(flat[known], minlength=5).cumsum(0).tolist()]


def test_what_does_not_fit_is_refused(experts: ExpertKernels, device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"expected experts up \[E, 2 \* F, H\]"):
        experts.pack_experts(draw(2, 6, 4), draw(2, 4, 4))
    with pytest.raises(ValueError, match="cannot choose 5 experts"):
        experts.choose(draw(2, 4).to(device), 5, is_normalised=True)
    packed = experts.pack_experts(draw(2, 8, 4), draw(2, 4, 4))
    choice = there(REFERENCE.choose(draw(3, 2), 1, is_normalised=True), device)
    with pytest.raises(ValueError, match=r"expected ids and weights \[T, k\]"):
        experts.apply(draw(2, 4).to(device), packed, choice, "silu")
    with pytest.raises(TypeError, match="another back end"):
        experts.apply(
            draw(3, 4).to(device),
            REFERENCE.pack_experts(draw(2, 8, 4), draw(2, 4, 4)),
            choice,
            "silu",
        )
