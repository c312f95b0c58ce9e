"""The native projection against the reference, and a row's bits against everything that must not change them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.interface import Kernels

SHAPES = [(1, 64, 64), (3, 7, 5), (6, 100, 130), (7, 33, 17), (13, 1, 1), (130, 300, 200), (481, 65, 80)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_agrees_with_the_reference(
    native_isa: Kernels, reference: Kernels, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, num_inputs, num_outputs = shape
    x, weight, bias = draw(num_rows, num_inputs, dtype=dtype), draw(num_outputs, num_inputs, dtype=dtype), draw(num_outputs)
    for own_bias in (None, bias.to(dtype)):
        want = reference.linear(x, reference.pack_linear(weight, own_bias), out_dtype="float32")
        packed = native_isa.pack_linear(weight, own_bias)
        wide = native_isa.linear(x, packed, out_dtype="float32")
        torch.testing.assert_close(wide, want, atol=1e-4, rtol=1e-4)
        assert torch.equal(native_isa.linear(x, packed), wide.to(dtype))  # rounded once, to nearest even


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_x_and_the_weight_may_differ_in_dtype(
    native_isa: Kernels, reference: Kernels, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x, weight = draw(9, 50, dtype=dtypes[0]), draw(40, 50, dtype=dtypes[1])
    got = native_isa.linear(x, native_isa.pack_linear(weight), out_dtype="float32")
    want = reference.linear(x.float(), reference.pack_linear(weight.float()))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_inputs", [64, 301, 600])
def test_a_row_has_the_same_bits_in_any_batch(native_isa: Kernels, dtype: torch.dtype, num_inputs: int) -> None:
    x = draw(130, num_inputs, dtype=dtype)
    packed = native_isa.pack_linear(draw(150, num_inputs, dtype=dtype), draw(150))
    whole = native_isa.linear(x, packed, out_dtype="float32")
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 11, 121):
        part = native_isa.linear(x[:count].contiguous(), packed, out_dtype="float32")
        assert torch.equal(part, whole[:count]), f"batch of {count}"
    for row in (1, 5, 6, 119, 120, 129):
        assert torch.equal(native_isa.linear(x[row : row + 1], packed, out_dtype="float32")[0], whole[row]), f"row {row}"


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
    mine, x = cpu.isa(), draw(3, 31, dtype=torch.bfloat16)
    cpu.set_isa(cpu.supported_isas()[0])
    packed = native_isa.pack_linear(draw(20, 31, dtype=torch.bfloat16))
    plain = native_isa.linear(x, packed, out_dtype="float32")
    cpu.set_isa(mine)
    torch.testing.assert_close(native_isa.linear(x, packed, out_dtype="float32"), plain, atol=1e-5, rtol=1e-5)


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
