"""Native norms, activations, rotary embedding and lookup against the reference,
and their rows' bits."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.interface import Kernels, QuantizedWeight
from quire.program.operations import Activation, Gating

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 5, 64, 100, 257]
ACTIVATIONS = get_args(Activation)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    """To a few roundings of the dtype."""
    near = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-3, 1e-2)}[want.dtype]
    torch.testing.assert_close(got, want, atol=near[0], rtol=near[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(native_isa: Kernels, reference: Kernels, width: int, dtype: torch.dtype) -> None:
    x, residual = draw(9, width, dtype=dtype), draw(width, 9, dtype=dtype).T.contiguous()
    weight = draw(width, dtype=dtype)
    got = native_isa.rms_norm(x, weight, 1e-5, weight_offset=1.0)
    assert_near(got, reference.rms_norm(x, weight, 1e-5, weight_offset=1.0))
    normed, total = native_isa.add_rms_norm(x, residual, weight, 1e-5)
    want_normed, want_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, want_total)
    assert_near(normed, want_normed)
    # fused and apart are the same bits
    assert torch.equal(normed, native_isa.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(
    native_isa: Kernels, reference: Kernels, width: int, dtype: torch.dtype
) -> None:
    x, weight, bias = (
        draw(9, width, dtype=dtype) + 3,
        draw(width, dtype=dtype),
        draw(width, dtype=dtype),
    )
    for own_bias in (None, bias):
        got, want = (each.layer_norm(x, weight, own_bias, 1e-5) for each in (native_isa, reference))
        assert_near(got, want)


def test_norm_weights_may_be_float32_beside_bfloat16(
    native_isa: Kernels, reference: Kernels
) -> None:
    x, weight = draw(2, 3, 40, dtype=torch.bfloat16), draw(40)
    got = native_isa.rms_norm(x, weight, 1e-6)
    assert got.shape == x.shape
    assert_near(got, reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(
    native_isa: Kernels, reference: Kernels, activation: Activation, dtype: torch.dtype
) -> None:
    x = torch.cat(
        [torch.linspace(-120, 120, 999), torch.linspace(-6, 6, 4001), torch.tensor([0.0, 1e-30])]
    ).to(dtype)
    got = native_isa.activate(x, activation)
    assert_near(got, reference.activate(x, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gating", get_args(Gating))
def test_gated_products(
    native_isa: Kernels, reference: Kernels, gating: Gating, dtype: torch.dtype
) -> None:
    gate_up = torch.stack([draw(7, 33) * 5, draw(33, 7).T * 5], dim=1).reshape(7, 66).to(dtype)
    got = native_isa.gated(gate_up, gating)
    assert_near(got, reference.gated(gate_up, gating))


def test_a_gating_of_both_sides_is_no_activation(native_isa: Kernels, reference: Kernels) -> None:
    for kernels in (native_isa, reference):
        with pytest.raises(ValueError, match="'clamped_swish' is not one of silu"):
            kernels.activate(torch.zeros(2), "clamped_swish")  # type: ignore[arg-type]
        gate_up = torch.tensor([[torch.nan, 1.0, 99.0, 1.0, torch.nan, 99.0]])
        got = kernels.gated(gate_up, "clamped_swish")
        assert got.isnan().tolist() == [[True, True, False]]
        assert got[0, 2] == pytest.approx(8 * 7 / (1 + 2.718281828459045 ** (-1.702 * 7)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_pass_on_what_is_not_finite(
    native_isa: Kernels, activation: Activation
) -> None:
    x = torch.tensor([float("nan"), float("inf"), 1.0])
    got = native_isa.activate(x, activation)
    assert got[0].isnan()
    assert got[1] == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "half"), [(16, 8), (64, 32), (80, 13), (64, 16)])
def test_rope(
    native_isa: Kernels,
    reference: Kernels,
    head_size: int,
    half: int,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    cos_sin, positions = draw(50, 2, half), torch.tensor([0, 49, 7, 7, 31])
    wide = draw(5, 4, head_size, dtype=dtype)
    got, want = wide.clone(), wide.clone()
    # a strided view: queries within QKV
    native_isa.rope(got[:, 1:3], positions, cos_sin, interleaved=interleaved)
    reference.rope(want[:, 1:3], positions, cos_sin, interleaved=interleaved)
    assert_near(got, want)
    assert torch.equal(got[:, [0, 3]], wide[:, [0, 3]])
    assert not torch.equal(got[:, 1:3], wide[:, 1:3])


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_embedding(native_isa: Kernels, reference: Kernels, dtype: torch.dtype) -> None:
    table, ids = draw(30, 7, dtype=dtype), torch.tensor([0, 29, 3, 3])
    assert torch.equal(native_isa.embedding(ids, table), reference.embedding(ids, table))
    for kernels in (native_isa, reference):
        for bad in (30, -1):
            with pytest.raises(IndexError, match="outside the table of 30 rows"):
                kernels.embedding(torch.tensor([1, bad]), table)


@pytest.mark.parametrize("dtype", [*DTYPES])
@pytest.mark.parametrize("shape", [(1, 1), (15, 8), (16, 7), (33, 65)])
def test_rows_are_had_back_from_a_packed_weight(
    native_isa: Kernels, reference: Kernels, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = draw(*shape, dtype=dtype)
    ids = torch.arange(shape[0]).repeat(2).flip(0)
    for kernels in (native_isa, reference):
        table = kernels.table_of(kernels.pack_linear(weight))
        assert table is not None and table.shape == shape and table.dtype == dtype
        assert torch.equal(kernels.embedding(ids, table), weight[ids])
        with pytest.raises(IndexError, match=f"outside the table of {shape[0]} rows"):
            kernels.embedding(torch.tensor([shape[0]]), table)


def test_rows_of_integers_cannot_be_had_back(native: Kernels, reference: Kernels) -> None:
    values = torch.ones(4, 8, dtype=torch.int8)
    weight = QuantizedWeight(
        values, torch.ones(4, 1), None, bits=8, group_size=8, activations="int8"
    )
    for kernels in (native, reference):
        assert kernels.table_of(kernels.pack_quantized(weight)) is None


def run_all(kernels: Kernels, x: Tensor, cos_sin: Tensor) -> list[Tensor]:
    """Every row operation on x [T, 96]."""
    weight = draw(96)
    heads = x.view(-1, 3, 32).clone()
    kernels.rope(heads, torch.arange(x.shape[0]) % 5, cos_sin)
    fused = kernels.add_rms_norm(x, x, weight, 1e-5)
    norms = [kernels.rms_norm(x, weight, 1e-5), kernels.layer_norm(x, weight, weight, 1e-5)]
    return [
        heads,
        *fused,
        *norms,
        *(kernels.gated(x, each) for each in ACTIVATIONS),
        kernels.activate(x, "gelu"),
    ]


@pytest.mark.usefixtures("restore_threads")
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(native_isa: Kernels) -> None:
    x, cos_sin = draw(2000, 96), draw(5, 2, 16)
    cpu.set_num_threads(1)
    whole = run_all(native_isa, x, cos_sin)
    for count in (1, 5, 35):
        for part, want in zip(
            run_all(native_isa, x[:count].contiguous(), cos_sin), whole, strict=True
        ):
            assert torch.equal(part, want[:count])
    for threads in (2, 3):
        cpu.set_num_threads(threads)
        for part, want in zip(run_all(native_isa, x, cos_sin), whole, strict=True):
            assert torch.equal(part, want)


def test_empty_tensors(native: Kernels) -> None:
    nothing = torch.empty(0, 8)
    assert all(each.numel() == 0 for each in run_all(native, torch.empty(0, 96), draw(5, 2, 16)))
    assert native.rms_norm(nothing, torch.ones(8), 1e-5).shape == (0, 8)
    assert native.embedding(torch.empty(0, dtype=torch.int64), torch.ones(3, 8)).shape == (0, 8)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "expected", lambda k: k.rms_norm(draw(2, 8), draw(9), 1e-5)),
        (ValueError, "not contiguous", lambda k: k.rms_norm(draw(8, 2).T, draw(8), 1e-5)),
        (TypeError, "float64", lambda k: k.rms_norm(draw(2, 8).double(), draw(8), 1e-5)),
        (ValueError, "residual", lambda k: k.add_rms_norm(draw(2, 8), draw(3, 8), draw(8), 1e-5)),
        (ValueError, "bias", lambda k: k.layer_norm(draw(2, 8), draw(8), draw(7), 1e-5)),
        (ValueError, "'relu' is not one of", lambda k: k.activate(draw(2, 8), "relu")),
        (ValueError, r"2 \* F", lambda k: k.gated(draw(2, 7), "silu")),
        (
            ValueError,
            "position 5 is outside",
            lambda k: k.rope(draw(1, 1, 8), torch.tensor([5]), draw(5, 2, 4)),
        ),
        (
            ValueError,
            "10 rotated",
            lambda k: k.rope(draw(1, 1, 8), torch.tensor([1]), draw(5, 2, 5)),
        ),
        (
            TypeError,
            "int64",
            lambda k: k.rope(draw(1, 1, 8), torch.tensor([1]).int(), draw(5, 2, 4)),
        ),
        (
            ValueError,
            "not contiguous",
            lambda k: k.rope(draw(1, 8, 2).transpose(1, 2), torch.tensor([1]), draw(5, 2, 4)),
        ),
        (TypeError, "int64", lambda k: k.embedding(torch.tensor([1]).int(), draw(3, 4))),
    ],
)
def test_wrong_arguments_are_refused(
    native: Kernels, error: type[Exception], match: str, call: Any
) -> None:
    with pytest.raises(error, match=match):
        call(native)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 100), (40, 4099)])
def test_is_finite_finds_a_single_culprit(
    native_isa: Kernels, reference: Kernels, shape: tuple[int, int], dtype: Any
) -> None:
    largest = torch.finfo(dtype).max
    for place in (0, shape[0] * shape[1] // 2, -1):
        x = torch.full(shape, largest, dtype=dtype)
        assert native_isa.is_finite(x) and reference.is_finite(x), "a sum would overflow"
        for value in (torch.nan, torch.inf, -torch.inf):
            x.view(-1)[place] = value
            assert not native_isa.is_finite(x) and not reference.is_finite(x)
