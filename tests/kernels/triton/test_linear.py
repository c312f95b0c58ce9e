"""Triton's projections of floating-point weights against the reference; company changes no bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from kernel_cases import IS_THOROUGH, thorough
from torch import Tensor

from quire.kernels import load
from quire.kernels.interface import Kernels

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from quire.kernels.triton import linear
from quire.kernels.triton.kernels import TritonKernels
from quire.kernels.triton.linear import ProductOptions, library_sums, split_inputs
from quire.kernels.triton.tuning import FOLDER, Tuning

WIDE = 600 if IS_THOROUGH else 264
"""Inputs that make several chunks; fewer than on a GPU do for the interpreter's tiles."""
NEAR = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (5e-2, 2e-2), torch.float16: (2e-2, 4e-3)}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.cpu(), want, atol=NEAR[dtype][0], rtol=NEAR[dtype][1])


@pytest.mark.parametrize(
    ("shape", "num_rows", "dtype"),
    [
        thorough((70, 200), 37, torch.float32),
        ((70, 200), 3, torch.bfloat16),
        ((34, WIDE), 5, torch.float32),  # several chunks, side by side
        ((34, WIDE), 23, torch.bfloat16),  # several chunks in one program
        ((130, 33), 1, torch.float16),
    ],
)
def test_it_agrees_with_the_reference(
    kernels: Kernels,
    reference: Kernels,
    device: torch.device,
    shape: tuple[int, int],
    num_rows: int,
    dtype: torch.dtype,
) -> None:
    weight, bias, x = (
        draw(*shape, dtype=dtype),
        draw(shape[0], dtype=dtype),
        draw(num_rows, shape[1], dtype=dtype),
    )
    ours, theirs = kernels.pack_linear(weight, bias), reference.pack_linear(weight, bias)
    assert (ours.num_outputs, ours.num_inputs) == shape
    there = x.to(device)
    assert_near(kernels.linear(there, ours), reference.linear(x, theirs), dtype)
    got, want = (
        kernels.linear(there, ours, out_dtype="float32"),
        reference.linear(x, theirs, out_dtype="float32"),
    )
    torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=1e-3)
    assert_near(
        kernels.gated_linear(there, ours, "silu"), reference.gated_linear(x, theirs, "silu"), dtype
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((40, WIDE), torch.bfloat16),
        thorough((40, WIDE), torch.float32),
        thorough((96, 64), torch.bfloat16),
        ((96, 64), torch.float32),
    ],
)
def test_company_changes_no_bit(
    kernels: Kernels, device: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """All rows together are so many that one program adds up their chunks;
    few rows' are computed side by side."""
    packed = kernels.pack_linear(draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype))
    assert isinstance(kernels, TritonKernels)
    count = kernels.tuning.linear.max_partial_rows + 15
    x = draw(count, shape[1], dtype=dtype).to(device)
    whole, gated = kernels.linear(x, packed), kernels.gated_linear(x, packed, "gelu")
    for rows in (slice(16, 20), slice(34, 35), slice(3, 24), slice(count - 5, count)):
        part = x[rows].contiguous()
        assert torch.equal(kernels.linear(part, packed), whole[rows]), rows
        if part.shape[0] < 16:
            assert torch.equal(kernels.gated_linear(part, packed, "gelu"), gated[rows]), rows


def test_without_invariance_many_rows_are_a_librarys(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = load("triton", str(device), is_invariant=False)
    assert isinstance(kernels, TritonKernels) and not kernels.is_invariant
    assert load("triton", str(device)).options == ProductOptions(has_fp8=kernels.options.has_fp8)  # type: ignore[attr-defined]
    least = kernels.options.min_library_rows
    assert least is not None
    calls: list[int] = []

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        calls.append(len(x))
        return library_sums(x, weight)

    monkeypatch.setattr(linear, "library_sums", counted)
    weight, bias, x = draw(34, WIDE), draw(34), draw(least, WIDE)
    packed, plain = kernels.pack_linear(weight, bias), kernels.pack_linear(weight)
    there, want = x.to(device), x @ weight.t()
    assert_near(kernels.linear(there, packed), want + bias, torch.float32)
    gate, up = (want + bias).chunk(2, dim=1)
    gated = kernels.gated_linear(there, packed, "silu").cpu()
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, atol=1e-3, rtol=1e-3)
    assert calls == [least, least]
    assert_near(kernels.linear(there, plain), want, torch.float32)  # torch's product as it is
    kernels.linear(there[1:].contiguous(), packed)
    assert calls == [least, least]


@pytest.mark.parametrize("shape", [(300, 64), (20, WIDE)])
def test_argmax_is_the_largest_output(
    kernels: Kernels, device: torch.device, shape: tuple[int, int]
) -> None:
    weight = draw(*shape)
    weight[17] = weight[3]  # a tie
    packed, x = kernels.pack_linear(weight), draw(19, shape[1]).to(device)
    x[4] = torch.nan
    ids, values = kernels.linear_argmax(x, packed)
    products = kernels.linear(x, packed, out_dtype="float32")
    assert values[4].isnan()
    rest = [row for row in range(19) if row != 4]
    assert torch.equal(values[rest], products[rest].max(dim=1).values)
    first = (products[rest] == values[rest, None]).int().argmax(dim=1)
    assert torch.equal(ids[rest], first)


def test_no_rows(kernels: Kernels, device: torch.device) -> None:
    packed = kernels.pack_linear(draw(8, 16))
    none = torch.empty(0, 16, device=device)
    assert kernels.linear(none, packed).shape == (0, 8)
    assert kernels.gated_linear(none, packed, "silu").shape == (0, 4)
    assert kernels.linear_argmax(none, packed)[0].shape == (0,)


def test_what_does_not_fit_is_refused(
    kernels: Kernels, reference: Kernels, device: torch.device
) -> None:
    packed = kernels.pack_linear(draw(8, 16))
    with pytest.raises(ValueError, match="16 inputs"):
        kernels.linear(draw(2, 8).to(device), packed)
    with pytest.raises(TypeError, match="bfloat16"):
        kernels.linear(draw(2, 16, dtype=torch.bfloat16).to(device), packed)
    with pytest.raises(TypeError, match="another back end"):
        kernels.linear(draw(2, 16).to(device), reference.pack_linear(draw(8, 16)))
    with pytest.raises(ValueError, match="expected weight"):
        kernels.pack_linear(draw(8, 16), draw(7))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_stretches_cover_the_inputs(path: Path) -> None:
    tuning = Tuning.read(path)
    for num_outputs, num_inputs in (
        (1, 1),
        (128, 4096),
        (4096, 14336),
        (150_000, 1024),
        (640, 100),
    ):
        length, count = split_inputs(num_outputs, num_inputs, tuning.linear, tuning.num_programs)
        assert length % tuning.linear.block_k == 0
        assert (count - 1) * length < num_inputs <= count * length
