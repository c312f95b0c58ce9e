"""The native projection against the reference,
and a row's bits against everything that must not change them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels import cpu
from quire.kernels.cpu.sampling import NativeSampling
from quire.kernels.interface import Kernels, QuantizedWeight
from quire.kernels.reference.linear import dequantized
from quire.kernels.reference.sampling import ReferenceSampling
from quire.kernels.sampling import Draws, Keys, ScaledRows
from quire.program.operations import Activation

ACTIVATIONS = get_args(Activation)

SHAPES = [
    (1, 64, 64),
    (3, 7, 5),
    (6, 100, 130),
    (7, 33, 17),
    (13, 1, 1),
    (130, 300, 200),
    (481, 65, 80),
]


@pytest.fixture
def native_isa(native_projections: Kernels) -> Kernels:
    return native_projections


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_agrees_with_the_reference(
    native_isa: Kernels, reference: Kernels, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, num_inputs, num_outputs = shape
    x, weight, bias = (
        draw(num_rows, num_inputs, dtype=dtype),
        draw(num_outputs, num_inputs, dtype=dtype),
        draw(num_outputs),
    )
    for own_bias in (None, bias.to(dtype)):
        want = reference.linear(x, reference.pack_linear(weight, own_bias), out_dtype="float32")
        packed = native_isa.pack_linear(weight, own_bias)
        wide = native_isa.linear(x, packed, out_dtype="float32")
        torch.testing.assert_close(wide, want, atol=1e-4, rtol=1e-4)
        # rounded once, to nearest even
        assert torch.equal(native_isa.linear(x, packed), wide.to(dtype))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_x_and_the_weight_may_differ_in_dtype(
    native_isa: Kernels, reference: Kernels, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x, weight = draw(9, 50, dtype=dtypes[0]), draw(40, 50, dtype=dtypes[1])
    got = native_isa.linear(x, native_isa.pack_linear(weight), out_dtype="float32")
    want = reference.linear(x.float(), reference.pack_linear(weight.float()))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_inputs", [64, 301, 600])
def test_a_row_has_the_same_bits_in_any_batch(
    native_isa: Kernels, dtype: torch.dtype, num_inputs: int
) -> None:
    x = draw(130, num_inputs, dtype=dtype)
    packed = native_isa.pack_linear(draw(150, num_inputs, dtype=dtype), draw(150))
    whole = native_isa.linear(x, packed, out_dtype="float32")
    # every height of a tile, and one row more than a block
    for count in (*range(1, 16), 27, 29, 121, 127):
        part = native_isa.linear(x[:count].contiguous(), packed, out_dtype="float32")
        assert torch.equal(part, whole[:count]), f"batch of {count}"
    for row in (1, 5, 6, 13, 14, 125, 126, 129):
        assert torch.equal(
            native_isa.linear(x[row : row + 1], packed, out_dtype="float32")[0], whole[row]
        ), f"row {row}"


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("num_rows", [1, 6, 7, 250, 961])
def test_the_number_of_threads_changes_no_bit(native_isa: Kernels, num_rows: int) -> None:
    x, packed = draw(num_rows, 300), native_isa.pack_linear(draw(500, 300))
    results = []
    for count in (1, 2, 3):
        cpu.set_num_threads(count)
        results.append(native_isa.linear(x, packed))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_an_output_does_not_depend_on_the_other_outputs(native_isa: Kernels) -> None:
    x, weight = draw(20, 128), draw(200, 128)
    whole = native_isa.linear(x, native_isa.pack_linear(weight))
    part = native_isa.linear(x, native_isa.pack_linear(weight[37:99]))
    assert torch.equal(part, whole[:, 37:99])


# ---- gated MLPs ----


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 50, 64, 100])
def test_a_gated_projection_is_rounded_once(
    native_isa: Kernels, reference: Kernels, width: int, dtype: torch.dtype
) -> None:
    weight, bias = draw(2 * width, 40, dtype=dtype), draw(2 * width)
    for own_bias in (None, bias):
        packed = native_isa.pack_linear(weight, own_bias)
        for num_rows in (1, 5, 130):
            x = draw(num_rows, 40, dtype=dtype)
            for activation in ACTIVATIONS:
                got = native_isa.gated_linear(x, packed, activation)
                apart = native_isa.gated(
                    native_isa.linear(x, packed, out_dtype="float32"), activation
                )
                assert torch.equal(got, apart.to(dtype)), f"{num_rows} rows, {activation}"
                want = reference.gated_linear(
                    x, reference.pack_linear(weight, own_bias), activation
                )
                torch.testing.assert_close(
                    got, want, atol=1e-3, rtol=1e-2 if dtype is torch.bfloat16 else 1e-3
                )


# ---- integers ----

QUANTIZED = [
    (8, 96, 96),
    (8, 512, 32),
    (8, 2560, 2560),
    (8, 45, 15),
    (4, 128, 32),
    (4, 256, 128),
    (4, 60, 20),
    (4, 21, 3),
]
"""(bits, inputs, group size)"""


def quantized(
    bits: Literal[4, 8],
    shape: tuple[int, int],
    size: int,
    activations: Literal["int8", "float"],
    *,
    offsets: bool = False,
) -> QuantizedWeight:
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    generator = torch.Generator().manual_seed(shape[0] + size)
    values = torch.randint(low, high, shape, generator=generator).to(torch.int8)
    values[0, : shape[1] // 2] = low  # the extremes, all of one sign: nothing may saturate
    values[-1, : shape[1] // 2] = high - 1
    grid = (shape[0], shape[1] // size)
    scales = torch.rand(grid, generator=generator) / 16
    shifts = torch.randn(grid, generator=generator) / 16 if offsets else None
    return QuantizedWeight(values, scales, shifts, bits, size, activations)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("bits", "num_inputs", "size"), QUANTIZED)
def test_int8_inputs_give_the_bits_of_the_reference(
    native_isa: Kernels,
    reference: Kernels,
    bits: Literal[4, 8],
    num_inputs: int,
    size: int,
    offsets: bool,
) -> None:
    weight = quantized(bits, (70, num_inputs), size, "int8", offsets=offsets)
    x, bias = draw(130, num_inputs), draw(70)
    x[1] = x[1].abs().max()  # every input at the largest integer
    x[2] = -x[1]
    want = reference.linear(x[:11], reference.pack_quantized(weight, bias))
    packed = native_isa.pack_quantized(weight, bias)
    whole = native_isa.linear(x, packed)
    assert torch.equal(whole[:11], want)
    for count in (*range(1, 16), 29, 127):
        assert torch.equal(native_isa.linear(x[:count], packed), whole[:count]), f"batch of {count}"
    for row in (5, 6, 14, 126, 129):
        assert torch.equal(native_isa.linear(x[row : row + 1], packed)[0], whole[row]), f"row {row}"


@pytest.mark.parametrize("size", [64, 512, 1030])
def test_sums_are_exact_however_many_pairs_of_inputs_are_large(
    native_isa: Kernels, reference: Kernels, size: int
) -> None:
    """Neighbours that meet the largest weights, at and beyond what 16 bits hold of them."""
    num_inputs = 2 * size
    weight = quantized(8, (35, num_inputs), size, "int8")
    weight.values[1], weight.values[2] = 127, -128
    pairs = torch.tensor(
        [[64, 64], [64, 65], [127, 1], [127, 2], [-127, -1], [-127, -2], [127, 127], [127, -127]]
    )
    generator = torch.Generator().manual_seed(size)
    fractions = torch.tensor([0.0, 0.01, 0.1, 0.2, 0.25, 0.3, 0.6, 1.0]).repeat(3)[:, None]
    is_large = torch.rand(24, num_inputs // 2, generator=generator) < fractions
    chosen = pairs[torch.randint(0, 8, is_large.shape, generator=generator)]
    small = torch.randint(-60, 61, chosen.shape, generator=generator)
    x = torch.where(is_large[..., None], chosen, small).reshape(24, num_inputs).float()
    x[:, 0] = 127  # so that the scale is one, and these are the integers
    want = reference.linear(x, reference.pack_quantized(weight))
    packed = native_isa.pack_quantized(weight)
    assert torch.equal(native_isa.linear(x, packed), want)
    for row in range(24):
        assert torch.equal(native_isa.linear(x[row : row + 1], packed)[0], want[row]), f"row {row}"


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("bits", "num_inputs", "size"), QUANTIZED)
def test_float_inputs_give_the_bits_of_the_dequantized_weight(
    native_isa: Kernels, bits: Literal[4, 8], num_inputs: int, size: int, offsets: bool
) -> None:
    weight = quantized(bits, (70, num_inputs), size, "float", offsets=offsets)
    x = draw(130, num_inputs, dtype=torch.bfloat16)
    plain, packed = (
        native_isa.pack_linear(dequantized(weight), draw(70)),
        native_isa.pack_quantized(weight, draw(70)),
    )
    for count in (1, 6, 7, 130):
        assert torch.equal(
            native_isa.linear(x[:count], packed), native_isa.linear(x[:count], plain)
        ), f"batch of {count}"


def e2m1(shape: tuple[int, int], size: int) -> QuantizedWeight:
    """All numbers in all places of a word; small and large scales."""
    numbers = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12])
    places = torch.arange(shape[0] * shape[1]).view(shape) * 7 % 15
    generator = torch.Generator().manual_seed(5)
    exponents = torch.randint(-12, 3, (shape[0], shape[1] // size), generator=generator)
    exponents[0, 0], exponents[1, 0] = -126, 100
    return QuantizedWeight(
        numbers[places].to(torch.int8), torch.exp2(exponents.float()), None, 4, size, "float",
        is_mxfp4=True,
    )  # fmt: skip


@pytest.mark.parametrize(("num_inputs", "size"), [(64, 32), (96, 8), (608, 32), (40, 40)])
def test_mxfp4_gives_the_bits_of_the_dequantized_weight(
    native_isa: Kernels, num_inputs: int, size: int
) -> None:
    weight, x = e2m1((70, num_inputs), size), draw(130, num_inputs, dtype=torch.bfloat16)
    plain, packed = (
        native_isa.pack_linear(dequantized(weight), draw(70)),
        native_isa.pack_quantized(weight, draw(70)),
    )
    for count in (1, 6, 7, 130):
        got = native_isa.linear(x[:count], packed, out_dtype="float32")
        assert torch.equal(got, native_isa.linear(x[:count], plain, out_dtype="float32"))
    assert got.isfinite().all()
    assert packed.num_bytes == 80 * (num_inputs // 2 + num_inputs // size) + 70 * 4


def test_the_least_scales_of_mxfp4_are_exact(native_isa: Kernels) -> None:
    """Where halves of scales, and small products, are below the normal numbers."""
    weight = e2m1((64, 32), 32)
    exponents = torch.tensor([-128, -127, -126, -125]).repeat(16)
    weight = replace(weight, scales=torch.ldexp(torch.ones(64), exponents)[:, None])
    assert (weight.scales > 0).all()
    x = torch.eye(32, dtype=torch.bfloat16) * 2.0**100
    want = torch.ldexp(weight.values.float(), exponents[:, None] + 100).t()
    packed = native_isa.pack_quantized(weight)
    for count in (1, 32):
        assert torch.equal(native_isa.linear(x[:count], packed, out_dtype="float32"), want[:count])


def test_what_mxfp4_does_not_hold_is_refused(native: Kernels, reference: Kernels) -> None:
    weight = e2m1((32, 64), 32)
    for wrong in (5, -7, 13, -128):
        values = weight.values.clone()
        values[20, 33] = wrong
        with pytest.raises(ValueError, match="mxfp4 holds"):
            native.pack_quantized(replace(weight, values=values))
    for scale in (0.0, 3.0, 2.0**-129, 3 * 2.0**-128, 2.0**125, -1.0, -(2.0**-127)):
        scales = weight.scales.clone()
        scales[31, 1] = scale
        with pytest.raises(ValueError, match="mxfp4 holds"):
            native.pack_quantized(replace(weight, scales=scales))
    for kernels in (native, reference):
        with pytest.raises(ValueError, match="inputs in floating point"):
            kernels.pack_quantized(replace(weight, activations="int8"))
        with pytest.raises(ValueError, match="4 bits and no offsets"):
            kernels.pack_quantized(replace(weight, offsets=weight.scales))
    assert native.table_of(native.pack_quantized(weight)) is None


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("num_rows", [1, 6, 250])
def test_the_number_of_threads_changes_no_bit_of_integers(
    native_isa: Kernels, num_rows: int
) -> None:
    x, packed = (
        draw(num_rows, 512),
        native_isa.pack_quantized(quantized(4, (500, 512), 64, "int8", offsets=True)),
    )
    results = []
    for count in (1, 2, 3):
        cpu.set_num_threads(count)
        results.append(
            torch.cat(
                [native_isa.linear(x, packed), native_isa.gated_linear(x, packed, "silu")], dim=1
            )
        )
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_short_inputs_of_any_magnitude_are_quantized_exactly(
    native_isa: Kernels, reference: Kernels
) -> None:
    x = (draw(138, 256) * torch.logspace(-36, 36, 138)[:, None]).to(torch.bfloat16)
    unit = QuantizedWeight(
        torch.eye(256, dtype=torch.int8), torch.ones(256, 1), None, 8, 256, "int8"
    )
    want = reference.linear(x, reference.pack_quantized(unit))
    assert torch.equal(native_isa.linear(x, native_isa.pack_quantized(unit)), want)


def test_integers_take_rows_of_zeros_tiny_and_non_finite_values(
    native_isa: Kernels, reference: Kernels
) -> None:
    weight = quantized(8, (20, 32), 32, "int8")
    x = draw(6, 32)
    x[0], x[1], x[2, 3], x[3, 4], x[4] = 0.0, 1e-40, torch.inf, torch.nan, x[4] * 1e-37
    got = native_isa.linear(x, native_isa.pack_quantized(weight))
    torch.testing.assert_close(
        got, reference.linear(x, reference.pack_quantized(weight)), rtol=0, atol=0, equal_nan=True
    )
    assert got[:2].eq(0).all()
    assert got[2:4].isnan().all()
    assert got[4:].isfinite().all()


def test_a_packed_weight_is_restored_from_its_bytes(native: Kernels) -> None:
    from quire.kernels.cpu.linear import CpuLinear, PackedLayout

    x, weight = draw(3, 64), quantized(4, (40, 64), 32, "int8", offsets=True)
    packed = native.pack_quantized(weight, draw(40))
    assert isinstance(packed, CpuLinear)
    again = CpuLinear(PackedLayout(**asdict(packed.layout)), packed.data.clone(), packed.bias)
    assert torch.equal(native.linear(x, again), native.linear(x, packed))
    # panels, groups; scales and offsets, half bytes
    assert packed.data.nbytes == 3 * 2 * (2 * 16 * 4 + 16 * 32 // 2)
    with pytest.raises(ValueError, match=f"expected {packed.data.nbytes} bytes"):
        CpuLinear(packed.layout, packed.data[1:], packed.bias)
    with pytest.raises(ValueError, match=r"bias float32 \[40\]"):
        CpuLinear(packed.layout, packed.data, draw(41))
    with pytest.raises(ValueError, match="groups of 30"):
        _ = PackedLayout("int4", 40, 64, 30).num_bytes


def test_wrong_integers_are_refused(native: Kernels) -> None:
    good = quantized(4, (6, 32), 32, "int8")
    wrong: list[tuple[str, dict[str, object]]] = [
        ("int8 values", {"values": good.values.float()}),
        ("groups of 7", {"group_size": 7}),
        ("groups of 0", {"group_size": 0}),
        ("float32 scales", {"scales": good.scales.double()}),
        ("float32 scales", {"scales": good.scales[:5]}),
        ("float32 scales", {"offsets": good.scales[:5]}),
        ("4 bits hold -8 to 7", {"values": good.values * 2}),
    ]
    for message, change in wrong:
        with pytest.raises(ValueError, match=message):
            native.pack_quantized(replace(good, **change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bias"):
        native.pack_quantized(good, draw(7))
    with pytest.raises(ValueError, match="as many for gate as for up"):
        native.gated_linear(draw(1, 32), native.pack_linear(draw(5, 32)), "silu")
    big = QuantizedWeight(
        torch.zeros(1, 140_000, dtype=torch.int8), torch.ones(1, 1), None, 8, 140_000, "int8"
    )
    with pytest.raises(ConfigError, match="too large for exact sums"):
        native.pack_quantized(big)
    assert (
        native.linear(
            torch.ones(1, 140_000), native.pack_quantized(replace(big, activations="float"))
        ).item()
        == 0
    )


def test_no_rows_and_no_outputs(native: Kernels) -> None:
    assert native.linear(draw(0, 8), native.pack_linear(draw(5, 8))).shape == (0, 5)
    assert native.linear(draw(2, 8), native.pack_linear(torch.empty(0, 8))).shape == (2, 0)


def test_non_finite_values_stay_in_their_row(native_isa: Kernels) -> None:
    x, packed = draw(14, 40), native_isa.pack_linear(draw(30, 40))
    clean = native_isa.linear(x, packed)
    x[3, 5], x[9, 0] = float("nan"), float("inf")
    got = native_isa.linear(x, packed)
    others = [row for row in range(14) if row not in (3, 9)]
    assert torch.equal(got[others], clean[others])
    assert not got[3].isfinite().any()
    assert not got[9].isfinite().any()


def test_packing_keeps_nothing_of_the_original(native: Kernels) -> None:
    x, weight, bias = draw(4, 20), draw(6, 20), draw(6)
    packed = native.pack_linear(weight, bias)
    before = native.linear(x, packed)
    weight.zero_()
    bias.zero_()
    assert torch.equal(native.linear(x, packed), before)
    assert (packed.num_outputs, packed.num_inputs) == (6, 20)
    assert packed.num_bytes == 16 * 20 * 4 + 6 * 4  # one panel of 16 outputs, and the bias


def test_a_packed_weight_serves_every_instruction_set(native_isa: Kernels) -> None:
    x = draw(3, 31, dtype=torch.bfloat16)
    with cpu.using(isa=cpu.supported_isas()[0]):
        packed = native_isa.pack_linear(draw(20, 31, dtype=torch.bfloat16))
        plain = native_isa.linear(x, packed, out_dtype="float32")
    torch.testing.assert_close(
        native_isa.linear(x, packed, out_dtype="float32"), plain, atol=1e-5, rtol=1e-5
    )


def test_wrong_arguments_are_refused(native: Kernels, reference: Kernels) -> None:
    packed = native.pack_linear(draw(5, 8))
    with pytest.raises(ValueError, match=r"expected \[T, 8\]"):
        native.linear(draw(2, 9), packed)
    with pytest.raises(ValueError, match="not contiguous"):
        native.linear(draw(8, 2).T, packed)
    with pytest.raises(TypeError, match="float32 and bfloat16"):
        native.linear(draw(2, 8).double(), packed)
    with pytest.raises(TypeError, match="float32 and bfloat16"):
        native.pack_linear(draw(5, 8).half())
    with pytest.raises(TypeError, match="another back end"):
        native.linear(draw(2, 8), reference.pack_linear(draw(5, 8)))
    with pytest.raises(ValueError, match="bias"):
        native.pack_linear(draw(5, 8), draw(4))
    with pytest.raises(ValueError, match="not on the CPU"):
        native.linear(torch.empty(2, 8, device="meta"), packed)


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 600])
def test_argmax_is_that_of_the_logits(
    native_isa: Kernels, num_rows: int, dtype: torch.dtype
) -> None:
    """Over several slices of outputs, with outputs that tie and rows that are not finite."""
    x, weight = draw(num_rows, 24, dtype=dtype), draw(1300, 24, dtype=dtype)
    weight[1100:] = weight[:200]  # the lower id wins
    if num_rows > 1:
        x[1] = torch.nan
        x[2, 0] = torch.inf
    packed = native_isa.pack_linear(weight, draw(1300)[:1300])
    want = ReferenceSampling().argmax(native_isa.linear(x, packed, out_dtype="float32"))
    ids, values = native_isa.linear_argmax(x, packed)
    assert torch.equal(values.nan_to_num(nan=1e9), want[1].nan_to_num(nan=1e9))
    finite = want[1].isfinite()
    assert torch.equal(ids[finite], want[0][finite])


def test_the_lowest_of_equal_logits_wins_across_slices(native: Kernels) -> None:
    weight = torch.zeros(3000, 4)
    weight[[700, 1500, 2900]] = 1.0
    ids, values = native.linear_argmax(torch.ones(900, 4), native.pack_linear(weight))
    assert set(ids.tolist()) == {700} and set(values.tolist()) == {4.0}


@pytest.mark.slow_combinations(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [3, 600])
def test_draws_are_those_from_the_products(
    native_isa: Kernels, num_rows: int, dtype: torch.dtype
) -> None:
    """Over several slices, in which the largest output grows, at any temperature;
    most rows are drawn from twice."""
    x, weight = draw(num_rows, 24, dtype=dtype), draw(2900, 24, dtype=dtype)
    weight *= torch.linspace(0.1, 2.0, 2900, dtype=dtype)[:, None]
    x[0] = torch.nan
    x[1] = 0.0  # all tokens are equal
    packed = native_isa.pack_linear(weight)
    row = torch.cat([torch.arange(num_rows), torch.arange(1, num_rows)])
    keys = Keys(torch.arange(len(row)) * 7919 - 5, torch.arange(len(row)) % 50)
    logits = native_isa.linear(x, packed, out_dtype="float32")
    best, max_logits = NativeSampling().argmax(logits)
    for scale in (1e-6, 0.3, 1.0, 1e4):
        scales = torch.full((len(row),), scale)
        rows = ScaledRows(row, max_logits.nan_to_num(0.0)[row], scales)
        want = NativeSampling().draw(logits.nan_to_num(0.0), rows, None, keys)
        found = native_isa.linear_draws(x, packed, Draws(row, scales, keys))
        assert (
            found is not None
            and found[0][1:].equal(best[1:])
            and found[1][1:].equal(max_logits[1:])
        )
        assert found[1][0].isnan() and found[2][row > 0].equal(want[row > 0])


def test_draws_from_rows_that_are_not_there_are_refused(native: Kernels) -> None:
    one = torch.tensor([2])
    with pytest.raises(ValueError, match="row 2 of 2"):
        native.linear_draws(
            draw(2, 8), native.pack_linear(draw(5, 8)), Draws(one, torch.ones(1), Keys(one, one))
        )


@pytest.mark.skipif(
    not cpu.emulated_isas() and "avx512bf16" not in cpu.supported_isas(),
    reason="needs AVX512-VNNI at least",
)
@pytest.mark.parametrize("num_rows", [1, 6, 7, 130])
def test_pairs_of_bfloat16_are_multiplied_as_the_instruction_does(
    native: Kernels, num_rows: int
) -> None:
    """Two fused multiply-adds, the later input first.
    Every instruction set that has it gives these bits."""
    x, weight = draw(num_rows, 33, dtype=torch.bfloat16), draw(20, 33, dtype=torch.bfloat16)
    expected = torch.zeros(num_rows, 20, dtype=torch.float64)
    for k in range(0, 34, 2):
        for each in (k + 1, k):
            # the product of two bfloat16 is exact in float64, so that only the sum is rounded
            if each < 33:
                expected = (
                    (expected + x[:, each, None].double() * weight[:, each].double())
                    .float()
                    .double()
                )
    plain = native.linear(x, native.pack_linear(weight), out_dtype="float32")
    for isa in {"avx512bf16emulated", "avx512bf16"} & {
        *cpu.emulated_isas(),
        *cpu.supported_isas(),
    }:
        with cpu.using(isa=isa):
            got = native.linear(x, native.pack_linear(weight), out_dtype="float32")
        assert torch.equal(got.double(), expected)
    assert cpu.isa() == "avx512bf16" or not torch.equal(plain, got), "the instruction was not used"


def round_to_odd(x: Tensor) -> Tensor:
    """float64 to the float32 that is not larger, its last bit set where it is not equal."""
    near = x.float()
    zero = torch.zeros_like(near)
    cut = torch.where(near.double().abs() > x.abs(), torch.nextafter(near, zero), near)
    is_odd = cut.view(torch.int32) | (cut.double() != x).int()
    return is_odd.view(torch.float32).double()


@pytest.mark.skipif("neonbf16" not in cpu.supported_isas(), reason="needs Arm's FEAT_BF16")
@pytest.mark.parametrize("num_inputs", [33, 35, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 13])
def test_pairs_of_bfloat16_are_multiplied_as_arm_does(
    native: Kernels, num_rows: int, num_inputs: int
) -> None:
    """The sum of two products, rounded to odd, is added, and the sum rounded to odd."""
    x = draw(num_rows, num_inputs, dtype=torch.bfloat16)
    weight = draw(20, num_inputs, dtype=torch.bfloat16)
    products = x[:, None].double() * weight.double()  # exact
    padded = torch.nn.functional.pad(products, (0, num_inputs % 2))
    pairs = padded.view(num_rows, 20, -1, 2)
    expected = torch.zeros(num_rows, 20, dtype=torch.float64)
    for each in round_to_odd(pairs.sum(-1)).unbind(-1):
        expected = round_to_odd(expected + each)
    with cpu.using(isa="neonbf16"):
        got = native.linear(x, native.pack_linear(weight), out_dtype="float32")
    assert torch.equal(got.double(), expected)


@pytest.mark.parametrize("isa", cpu.emulated_isas() if cpu.IMPORT_ERROR is None else [])
def test_pairs_with_subnormal_numbers_count_as_zero(native: Kernels, isa: str) -> None:
    x = torch.tensor([[2.0**-130, 1.0, 2.0**-100, 0.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[2.0**20, 3.0, 2.0**-40, 1.0]], dtype=torch.bfloat16)
    with cpu.using(isa=isa):
        assert native.linear(x, native.pack_linear(weight)).item() == 3.0
        tiny = native.linear(
            x[:, 2:].contiguous(),
            native.pack_linear(weight[:, 2:].contiguous()),
            out_dtype="float32",
        )
        assert tiny.item() == 0.0
