"""Native mixtures of experts against the reference, and a token's bits against everything that must
not change them."""

from __future__ import annotations

import pytest
import torch
from quantized_checkpoints import mxfp4_weight as mxfp4
from routing_cases import ROUTINGS, chosen_by_hand, draw_case
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.cpu.experts import reasons_against
from quire.kernels.interface import ExpertChoice, Kernels, PackedLinear
from quire.program.operations import Routing
from quire.quant.formats import IntegerFormat
from quire.quant.rounding import quantize

FORMATS = ["float32", "bfloat16", "int8", "int4", "mxfp4"]
HIDDEN, INNER, EXPERTS = 96, 40, 7


@pytest.fixture
def native_isa(native_projections: Kernels) -> Kernels:
    return native_projections


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def pack(kernels: Kernels, weight: Tensor, form: str, bias: Tensor | None = None) -> PackedLinear:
    if form == "mxfp4":
        return kernels.pack_quantized(mxfp4(weight), bias)
    if not form.startswith("int"):
        return kernels.pack_linear(weight.to(getattr(torch, form)), bias)
    size = weight.shape[1] if form == "int8" else 8
    held = IntegerFormat(8 if form == "int8" else 4, size, "int8")
    return kernels.pack_quantized(quantize(weight, held), bias)


def layer(kernels: Kernels, form: str, *, inner: int = INNER) -> tuple[PackedLinear, PackedLinear]:
    up, down = draw(EXPERTS * 2 * inner, HIDDEN) / 8, draw(EXPERTS * HIDDEN, inner) / 4
    return pack(kernels, up, form), pack(kernels, down, form)


def activations(form: str, num_tokens: int) -> Tensor:
    return draw(num_tokens, HIDDEN).to(torch.bfloat16 if form == "bfloat16" else torch.float32)


def routed(kernels: Kernels, num_tokens: int, num_chosen: int = 3) -> ExpertChoice:
    logits = draw(num_tokens, EXPERTS)
    logits[:, 4] -= 50.0  # hardly anyone's choice
    return kernels.choose_experts(logits, Routing(EXPERTS, num_chosen, True))


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("num_experts", [1, 5, 16, 60, 300])
def test_choices(
    native_isa: Kernels, reference: Kernels, num_experts: int, is_normalised: bool
) -> None:
    logits, routing = draw(9, num_experts), Routing(num_experts, min(4, num_experts), is_normalised)
    logits[3, num_experts // 2 :] = -1e4
    got, want = (each.choose_experts(logits, routing) for each in (native_isa, reference))
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.weights, want.weights, atol=1e-6, rtol=1e-5)
    alone = native_isa.choose_experts(logits[5:6].contiguous(), routing)
    assert torch.equal(alone.weights[0], got.weights[5])


@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_of_groups_and_by_sigmoids(
    native_isa: Kernels, reference: Kernels, name: str
) -> None:
    logits, routing, bias = draw_case(name)
    ids, weights = chosen_by_hand(logits, routing, bias)
    for kernels in (native_isa, reference):
        got = kernels.choose_experts(logits, routing, bias)
        assert got.ids.tolist() == ids
        torch.testing.assert_close(got.weights, weights, atol=1e-6, rtol=1e-5)
        alone = kernels.choose_experts(logits[4:5].contiguous(), routing, bias)
        assert torch.equal(alone.weights[0], got.weights[4])


def test_a_bias_below_zero_opens_no_group_that_was_not_chosen(
    native_isa: Kernels, reference: Kernels
) -> None:
    """Filling other groups with zeros, as is sometimes done, would choose from them."""
    routing = Routing(6, 2, True, "sigmoid", 3, 1, "best_two")
    logits, bias = torch.zeros(1, 6), torch.tensor([-3.0, -3.1, -1.0, -1.1, -2.0, -2.1])
    for kernels in (native_isa, reference):
        choice = kernels.choose_experts(logits, routing, bias)
        assert choice.ids.tolist() == [[2, 3]] and choice.weights.tolist() == [[0.5, 0.5]]


def test_equal_groups_and_scores_go_to_the_lowest_ids(
    native_isa: Kernels, reference: Kernels
) -> None:
    routing = Routing(12, 3, True, "sigmoid", 4, 2, "best_two")
    logits = torch.tensor([[0.0] * 12, [-1.0] * 3 + [2.0] * 9])
    for kernels in (native_isa, reference):
        ids = kernels.choose_experts(logits, routing, torch.zeros(12)).ids
        assert ids.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_equals_go_to_the_lowest_ids(native_isa: Kernels, reference: Kernels) -> None:
    logits = torch.tensor([[0.0] * 9, [1, 3, 2, 3, 1, 2, 3, 2, 0], [-0.0, 0.0] + [-1.0] * 7])
    for kernels in (native_isa, reference):
        ids = kernels.choose_experts(logits, Routing(9, 4, True)).ids
        assert ids.tolist() == [[0, 1, 2, 3], [1, 3, 6, 2], [0, 1, 2, 3]]


def test_a_row_that_is_not_finite_gives_results_that_are_not(
    native_isa: Kernels, reference: Kernels
) -> None:
    logits, x = draw(4, EXPERTS), activations("float32", 4)
    logits[1, 2], logits[2, 0] = torch.nan, torch.inf
    for kernels in (native_isa, reference):
        choice = kernels.choose_experts(logits, Routing(EXPERTS, 3, False))
        assert choice.weights.isnan().all(dim=1).tolist() == [False, True, True, False]
        out = kernels.apply_experts(x, *layer(kernels, "float32"), choice, "silu")
        assert out.isnan().all(dim=1).tolist() == [False, True, True, False]
        assert out[[0, 3]].isfinite().all()


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 2, 60])
def test_it_agrees_with_the_reference(
    native_isa: Kernels, reference: Kernels, num_tokens: int, form: str
) -> None:
    x, choice = activations(form, num_tokens), routed(reference, num_tokens)
    choice.ids[0, 0] = EXPERTS  # held elsewhere
    got = native_isa.apply_experts(x, *layer(native_isa, form), choice, "gelu")
    want = reference.apply_experts(x, *layer(reference, form), choice, "gelu")
    near = 3e-2 if form == "bfloat16" else 1e-4
    torch.testing.assert_close(got, want, atol=near, rtol=near)


@pytest.mark.parametrize("form", FORMATS)
def test_each_expert_gives_the_bits_of_its_own_projections(native_isa: Kernels, form: str) -> None:
    """Those of `gated_linear` and `linear` with its part of the weights, weighed and added."""
    up, down = draw(EXPERTS * 2 * INNER, HIDDEN) / 8, draw(EXPERTS * HIDDEN, INNER) / 4
    x, choice = activations(form, 19), routed(native_isa, 19)
    want = torch.zeros(19, HIDDEN)
    for t, (ids, weights) in enumerate(zip(choice.ids, choice.weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            parts = (
                up.view(EXPERTS, 2 * INNER, HIDDEN)[expert],
                down.view(EXPERTS, HIDDEN, INNER)[expert],
            )
            gate_up, last = (pack(native_isa, part, form) for part in parts)
            inner = native_isa.gated_linear(x[t : t + 1], gate_up, "silu")
            want[t] += weight * native_isa.linear(inner, last, out_dtype="float32")[0]
    got = native_isa.apply_experts(x, *layer(native_isa, form), choice, "silu")
    assert torch.equal(got, want.to(x.dtype))


@pytest.mark.parametrize("form", FORMATS)
def test_company_threads_and_grouping_change_no_bit(
    native_isa: Kernels, form: str, restore_threads: None
) -> None:
    weights, x = layer(native_isa, form, inner=64), activations(form, 150)
    choice = routed(native_isa, 150)
    choice.ids[100:] = torch.tensor([5, 0, 6])  # fifty of one group
    cpu.set_num_threads(1)
    want = native_isa.apply_experts(x, *weights, choice, "silu")
    for num_threads in (1, 3):
        cpu.set_num_threads(num_threads)
        assert torch.equal(native_isa.apply_experts(x, *weights, choice, "silu"), want)
        for rows in (slice(0, 1), slice(7, 9), slice(90, 107), slice(149, 150)):
            part = ExpertChoice(choice.ids[rows], choice.weights[rows])
            got = native_isa.apply_experts(x[rows], *weights, part, "silu")
            assert torch.equal(got, want[rows])


def test_more_pairs_than_one_pass_takes(native: Kernels) -> None:
    num_tokens = (1 << 14) // 3 + 40
    weights, x = layer(native, "bfloat16", inner=8), activations("bfloat16", num_tokens)
    choice = routed(native, num_tokens)
    got = native.apply_experts(x, *weights, choice, "silu")
    few = slice(num_tokens - 50, num_tokens - 20)
    part = ExpertChoice(choice.ids[few].contiguous(), choice.weights[few].contiguous())
    assert torch.equal(native.apply_experts(x[few], *weights, part, "silu"), got[few])


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_biases_are_those_of_the_expert(native_isa: Kernels, reference: Kernels, form: str) -> None:
    x, choice = activations(form, 11), routed(reference, 11)
    outs = []
    for kernels in (native_isa, reference):
        up = pack(kernels, draw(EXPERTS * 2 * INNER, HIDDEN) / 8, form, draw(EXPERTS * 2 * INNER))
        down = pack(kernels, draw(EXPERTS * HIDDEN, INNER) / 4, form, draw(EXPERTS * HIDDEN))
        outs.append(kernels.apply_experts(x, up, down, choice, "clamped_swish"))
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)


def test_no_tokens(native: Kernels) -> None:
    choice = routed(native, 0)
    x = torch.empty(0, HIDDEN)
    assert native.apply_experts(x, *layer(native, "float32"), choice, "silu").shape == (0, HIDDEN)


def test_rows_are_gated(native_isa: Kernels, reference: Kernels) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, gate = draw(33, 50).to(dtype), (20 * draw(33, 1)).to(dtype)
        got, want = (each.gate_rows(x, gate) for each in (native_isa, reference))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6 if dtype.itemsize == 4 else 1e-2)
        assert torch.equal(native_isa.gate_rows(x[4:5], gate[4:5]), got[4:5])


def test_what_does_not_fit_is_refused(native: Kernels) -> None:
    up, down = layer(native, "float32")
    x, choice = activations("float32", 2), routed(native, 2)
    with pytest.raises(ValueError, match=r"experts up \[E \* 2 \* F, H\]"):
        native.apply_experts(x, down, up, choice, "silu")
    with pytest.raises(ValueError, match=r"x is \[2, 95\]"):
        native.apply_experts(x[:, 1:], up, down, choice, "silu")
    with pytest.raises(ValueError, match="cannot choose 8 of 7 experts"):
        native.choose_experts(draw(2, 7), Routing(7, 8, True))
    with pytest.raises(ValueError, match=r"cannot choose 5 of 8 experts \(2 of 4 groups\)"):
        native.choose_experts(draw(2, 8), Routing(8, 5, True, "sigmoid", 4, 2))
    with pytest.raises(ValueError, match="a bias is for experts that are chosen by sigmoids"):
        native.choose_experts(draw(2, 7), Routing(7, 2, True), draw(7))
    with pytest.raises(ValueError, match=r"expected a bias float32 \[7\]"):
        native.choose_experts(draw(2, 7), Routing(7, 2, True, "sigmoid"), draw(6))
    with pytest.raises(ValueError, match="gate_rows"):
        native.gate_rows(x, x)
    odd = (
        pack(native, draw(3 * 2 * 12, HIDDEN), "float32"),
        pack(native, draw(3 * HIDDEN, 12), "float32"),
    )
    assert reasons_against(HIDDEN, 12) == ["has experts of widths that 8 divides, not of 12"]
    assert reasons_against(90, 16) == ["has experts for hidden sizes that 16 divides, not for 90"]
    with pytest.raises(ValueError, match="does not begin with a panel"):
        native.apply_experts(x, *odd, choice, "silu")
