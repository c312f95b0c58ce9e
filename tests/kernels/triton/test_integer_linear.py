"""Triton's projections of integers: the reference's bits with int8 inputs,
near it with floating-point inputs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import thorough
from quantized_checkpoints import mxfp4_weight
from torch import Tensor

from quire.kernels.interface import Kernels, QuantizedWeight
from quire.kernels.reference.linear import quantize_row, quantize_row_fp8
from quire.quant.formats import GPU_MXFP4_SCALE_BYTES, IntegerFormat

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from quire.kernels.triton.integer_linear import IntegerLinear, pack_nibbles, quantize_rows
from quire.kernels.triton.kernels import TritonKernels


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def make(
    shape: tuple[int, int], bits: int, group: int, activations: str, *, has_offsets: bool
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits * 1000 + group)
    most = 8 if bits == 4 else 128
    values = torch.randint(-most, most, shape, generator=generator).to(torch.int8)
    grid = (shape[0], shape[1] // group)
    scales, offsets = torch.rand(grid, generator=generator), torch.randn(grid, generator=generator)
    return QuantizedWeight(
        values,
        scales,
        offsets if has_offsets else None,
        bits,  # type: ignore[arg-type]
        group,
        activations,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("bits", "group", "num_outputs", "has_offsets"),
    [
        (8, 128, 70, False),
        (8, 32, 71, True),
        (4, 32, 70, False),
        (4, 64, 71, True),
        (4, 16, 34, False),
    ],
)
def test_int8_inputs_give_the_references_bits(
    kernels: Kernels,
    reference: Kernels,
    device: torch.device,
    bits: int,
    group: int,
    num_outputs: int,
    has_offsets: bool,
) -> None:
    weight = make((num_outputs, 128), bits, group, "int8", has_offsets=has_offsets)
    x, bias = draw(19, 128), draw(num_outputs)
    x[3], x[5, 7] = 0.0, torch.nan
    got = kernels.linear(x.to(device), kernels.pack_quantized(weight, bias))
    want = reference.linear(x, reference.pack_quantized(weight, bias))
    assert torch.equal(got.cpu().nan_to_num(123.0), want.nan_to_num(123.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(8, 96), (4, 32)])
def test_floating_point_inputs_agree_with_the_reference(
    kernels: Kernels,
    reference: Kernels,
    device: torch.device,
    bits: int,
    group: int,
    dtype: torch.dtype,
) -> None:
    weight = make((70, 192), bits, group, "float", has_offsets=True)
    x = draw(19, 192).to(dtype)
    ours, theirs = kernels.pack_quantized(weight), reference.pack_quantized(weight)
    got, want = (
        kernels.linear(x.to(device), ours, out_dtype="float32"),
        reference.linear(x, theirs, out_dtype="float32"),
    )
    torch.testing.assert_close(got.cpu(), want, atol=2e-5 * float(want.abs().max()), rtol=1e-4)


@pytest.mark.parametrize(("bits", "activations"), [(8, "int8"), (4, "int8"), (4, "float")])
def test_gated_products(
    kernels: Kernels, reference: Kernels, device: torch.device, bits: int, activations: str
) -> None:
    weight, bias = make((72, 64), bits, 32, activations, has_offsets=False), draw(72)
    x = draw(5, 64)
    got = kernels.gated_linear(x.to(device), kernels.pack_quantized(weight, bias), "silu")
    want = reference.gated_linear(x, reference.pack_quantized(weight, bias), "silu")
    torch.testing.assert_close(got.cpu(), want, atol=1e-6 * float(want.abs().max()), rtol=1e-4)


def test_company_changes_no_bit(kernels: Kernels, device: torch.device) -> None:
    packed = kernels.pack_quantized(make((40, 128), 4, 32, "float", has_offsets=True))
    x = draw(37, 128).to(torch.bfloat16).to(device)
    whole = kernels.linear(x, packed)
    for rows in (slice(0, 1), slice(15, 18), slice(36, 37)):
        assert torch.equal(kernels.linear(x[rows].contiguous(), packed), whole[rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "group", "activations", "has_offsets"),
    [
        (8, 1024, "int8", False),
        thorough(4, 32, "float", True),
        thorough(8, 1024, "float", False),
        thorough(4, 1024, "int8", False),
        thorough(8, 1024, "fp8", False),
        thorough(8, 128, "fp8", False),
    ],
)
def test_stretches_side_by_side_change_no_bit(
    kernels: Kernels,
    reference: Kernels,
    device: torch.device,
    bits: int,
    group: int,
    activations: Any,
    has_offsets: bool,
) -> None:
    """Of parts of the only group, or of whole groups;
    many rows have theirs added in one program."""
    weight, bias = make((72, 1024), bits, group, activations, has_offsets=has_offsets), draw(72)
    if activations == "fp8":
        values, scales = draw(72, 1024).to(torch.float8_e4m3fn), draw(72, 1024 // group).abs()
        weight = QuantizedWeight(values, scales, None, 8, group, activations)
    packed = kernels.pack_quantized(weight, bias)
    assert isinstance(packed, IntegerLinear) and packed.num_splits > 1
    count = packed.tuning.max_partial_rows + 3
    x = draw(count, 1024).to(torch.bfloat16).to(device)
    whole, gated = kernels.linear(x, packed), kernels.gated_linear(x, packed, "silu")
    for rows in (slice(0, 1), slice(count - 5, count)):
        part = x[rows].contiguous()
        assert torch.equal(kernels.linear(part, packed), whole[rows])
        assert torch.equal(kernels.gated_linear(part, packed, "silu"), gated[rows])
    if activations == "int8":
        want = reference.linear(x[:2].cpu(), reference.pack_quantized(weight, bias))
        assert torch.equal(whole[:2].cpu(), want)


@pytest.mark.parametrize("num_outputs", [40, thorough(33)])
def test_mxfp4_agrees_with_the_reference(
    kernels: Kernels, reference: Kernels, device: torch.device, num_outputs: int
) -> None:
    weight, bias = mxfp4_weight(draw(num_outputs, 96)), draw(num_outputs)
    x = draw(19, 96).to(torch.bfloat16)
    ours = kernels.pack_quantized(weight, bias)
    got = kernels.linear(x.to(device), ours, out_dtype="float32")
    want = reference.linear(x, reference.pack_quantized(weight, bias), out_dtype="float32")
    torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=1e-4)
    alone = kernels.linear(x[7:8].to(device), ours, out_dtype="float32")
    assert torch.equal(alone, got[7:8])
    scale_bytes = GPU_MXFP4_SCALE_BYTES
    planned = IntegerFormat(4, 8, "float", is_mxfp4=True, scale_bytes=scale_bytes)
    padding = num_outputs % 2 * 96 // 2
    assert ours.num_bytes == planned.num_bytes(num_outputs, 96) + padding + bias.nbytes
    for wrong in (5, 13):
        values = weight.values.clone()
        values[3, 7] = wrong
        with pytest.raises(ValueError, match="mxfp4 holds twice"):
            kernels.pack_quantized(replace(weight, values=values))


def test_a_chain_of_roundings_is_not_cut(kernels: Kernels) -> None:
    packed = kernels.pack_quantized(make((40, 1024), 4, 32, "int8", has_offsets=False))
    assert isinstance(packed, IntegerLinear) and packed.num_splits == 1


def test_rows_are_quantized_as_the_reference_does(kernels: Kernels, device: torch.device) -> None:
    x = draw(6, 300) * 3
    x[1], x[2, 5], x[3, 6], x[4] = 0.0, torch.nan, -torch.inf, 1e-39
    values, scales = quantize_rows(x.to(device))
    want = [quantize_row(row) for row in x]
    assert torch.equal(values.cpu().int(), torch.stack([each for each, _ in want]))
    assert torch.equal(
        scales.cpu().nan_to_num(-1.0), torch.stack([scale for _, scale in want]).nan_to_num(-1.0)
    )


def make_fp8(num_outputs: int, group: int, activations: Any) -> QuantizedWeight:
    values, scales = (
        draw(num_outputs, 128).to(torch.float8_e4m3fn),
        draw(num_outputs, 128 // group).abs(),
    )
    return QuantizedWeight(values, scales, None, 8, group, activations)


@pytest.mark.parametrize(
    ("group", "activations"),
    [thorough(128, "fp8"), (32, "fp8"), thorough(128, "float"), (32, "float")],
)
def test_fp8_weights_agree_with_the_reference(
    kernels: Kernels, reference: Kernels, device: torch.device, group: int, activations: Any
) -> None:
    weight, bias, x = make_fp8(32, group, activations), draw(32), draw(17, 128).to(torch.bfloat16)
    x[3], x[5, 7] = 0.0, torch.nan
    ours, theirs = kernels.pack_quantized(weight, bias), reference.pack_quantized(weight, bias)
    got = kernels.linear(x.to(device), ours, out_dtype="float32")
    want = reference.linear(x, theirs, out_dtype="float32")
    near = (1e-5 if device.type == "cpu" else 1e-3) * float(want.nan_to_num().abs().max())
    torch.testing.assert_close(got.cpu(), want, atol=near, rtol=1e-4, equal_nan=True)
    gated = kernels.gated_linear(x.to(device), ours, "gelu_tanh").cpu()
    torch.testing.assert_close(
        gated, reference.gated_linear(x, theirs, "gelu_tanh"), atol=near, rtol=2e-2, equal_nan=True
    )
    alone = kernels.linear(x[16:17].to(device), ours, out_dtype="float32")
    assert torch.equal(alone, got[16:17])


def test_instructions_for_fp8_weights_give_the_bits_of_integers(
    kernels: Kernels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs that are not e4m3 themselves."""
    assert isinstance(kernels, TritonKernels)
    if kernels.device.type == "cuda" and not kernels.options.has_fp8:
        pytest.skip("no instructions for e4m3")
    x, results = draw(5, 128).to(torch.bfloat16).to(device), []
    for has_fp8 in (False, True):
        monkeypatch.setattr(kernels, "options", replace(kernels.options, has_fp8=has_fp8))
        results.append(
            kernels.linear(
                x, kernels.pack_quantized(make_fp8(32, 32, "float")), out_dtype="float32"
            )
        )
    assert torch.equal(*results)


def test_rows_become_fp8_as_the_reference_does(kernels: Kernels, device: torch.device) -> None:
    x = draw(5, 300) * 3
    x[1], x[2, 5], x[3] = 0.0, torch.inf, 1e-39
    values, scales = quantize_rows(x.to(device), "fp8")
    want = [quantize_row_fp8(row) for row in x]
    assert torch.equal(
        values.cpu().view(torch.float8_e4m3fn).float(), torch.stack([each for each, _ in want])
    )
    assert torch.equal(
        scales.cpu().nan_to_num(-1.0), torch.stack([scale for _, scale in want]).nan_to_num(-1.0)
    )


@pytest.mark.usefixtures("kernels")  # which corrects the interpreter
def test_a_librarys_sums_of_fp8_are_scaled_here(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, torch's product is emulated; on a GPU it is torch's own."""
    from quire.kernels.triton import integer_linear, tuning
    from quire.kernels.triton.linear import ProductOptions

    def product(inputs: Tensor, values: Tensor) -> Tensor:
        return (
            inputs.view(torch.float8_e4m3fn).float() @ values.view(torch.float8_e4m3fn).float().t()
        )

    if device.type == "cpu":
        monkeypatch.setattr(integer_linear, "library_sums", product)
    elif torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no matrix instructions for e4m3")
    weight, bias, x = make_fp8(48, 128, "fp8"), draw(48), draw(6, 128).to(torch.bfloat16).to(device)
    figures, results = tuning.tuning_for(device), []
    for options in (ProductOptions(), ProductOptions(min_scaled_rows=6, has_fp8=True)):
        packed = integer_linear.pack_quantized(weight, bias, figures, device, options)
        results.append(
            [integer_linear.integer_linear(x, packed, code, torch.float32) for code in (-1, 0)]
        )
        assert not integer_linear.is_for_library(packed, 5)
    for own, librarys in zip(*results, strict=True):
        torch.testing.assert_close(librarys, own, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("num_outputs", [1, 6, 7])
def test_nibbles_hold_both_halves(num_outputs: int) -> None:
    values = torch.randint(-8, 8, (num_outputs, 5), generator=torch.Generator().manual_seed(1)).to(
        torch.int8
    )
    packed = pack_nibbles(values)
    assert packed.shape == ((num_outputs + 1) // 2, 5)
    unpacked = torch.cat([(packed << 4) >> 4, packed >> 4])[:num_outputs]
    assert torch.equal(unpacked, values)


def test_wrong_weights_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="make groups smaller"):
        kernels.pack_quantized(make((2, 1 << 18), 4, 1 << 18, "int8", has_offsets=False))
    good = make((8, 64), 4, 32, "int8", has_offsets=False)
    with pytest.raises(ValueError, match="4 bits hold"):
        kernels.pack_quantized(QuantizedWeight(good.values * 2, good.scales, None, 4, 32, "int8"))
    with pytest.raises(ValueError, match="fp8 need a weight of e4m3"):
        kernels.pack_quantized(QuantizedWeight(good.values, good.scales, None, 8, 32, "fp8"))
    with pytest.raises(ValueError, match="e4m3 values have 8 bits"):
        kernels.pack_quantized(
            QuantizedWeight(good.values.to(torch.float8_e4m3fn), good.scales, None, 8, 32, "int8")
        )
    with pytest.raises(ValueError, match="does not divide"):
        kernels.pack_quantized(QuantizedWeight(good.values, good.scales, None, 4, 48, "int8"))
    with pytest.raises(ValueError, match="expected float32"):
        kernels.pack_quantized(
            QuantizedWeight(good.values, good.scales.half(), None, 4, 32, "int8")
        )
