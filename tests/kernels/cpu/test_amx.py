"""GEMMs of tiles and of pairs, emulated: against what Intel's manual says that the instruction
computes, stated anew.

And the instructions themselves, where the processor has them, against the emulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.interface import Kernels, QuantizedWeight

if TYPE_CHECKING:
    from tests.kernels.conftest import Paged

NAME = "amxemulated"
pytestmark = pytest.mark.skipif(
    cpu.IMPORT_ERROR is not None or NAME not in cpu.emulated_isas(),
    reason="needs native kernels and AVX512-VNNI",
)

Doubles = npt.NDArray[np.float64]
TINY = 2.0**-126


@pytest.fixture
def amx(native: Kernels) -> Iterator[Kernels]:
    with cpu.using(isa=NAME):
        yield native


def _flushed(x: Doubles) -> Doubles:
    return np.where(np.abs(x) < TINY, 0.0, x)


def _rounded_sum(a: Doubles, b: Doubles) -> Doubles:
    """a + b rounded once to float32, without subnormal numbers.

    The sum in float64 is rounded to odd (the error of it is exact, by Knuth's two-sum), so that
    rounding it again is harmless.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.where(
        (error != 0) & is_even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total
    )
    return _flushed(odd.astype(np.float32).astype(np.float64))


def _tdpbf16ps(sums: Doubles, x: Doubles, w: Doubles) -> Doubles:
    """sums [M, N] + x [M, 2 K] @ w [2 K, N]; products of two bfloat16 are exact in float64."""
    first, second = np.zeros_like(sums), np.zeros_like(sums)
    for k in range(0, x.shape[1], 2):
        first = _rounded_sum(first, x[:, k, None] * w[k])
        second = _rounded_sum(second, x[:, k + 1, None] * w[k + 1])
    return _rounded_sum(sums, _rounded_sum(first, second))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, cut at the words where the kernel cuts: 16 to a tile,
    or fewer that divide all inputs evenly."""
    num_words = -(-x.shape[1] // 2)
    steps = -(-num_words // 16)
    depth = num_words // steps if num_words % steps == 0 else 16
    padding = (0, 2 * steps * depth - x.shape[1])
    left, right = (
        _flushed(torch.nn.functional.pad(each, padding).double().numpy()) for each in (x, weight)
    )
    sums = np.zeros((x.shape[0], weight.shape[0]))
    for k in range(0, left.shape[1], 2 * depth):
        sums = _tdpbf16ps(sums, left[:, k : k + 2 * depth], right[:, k : k + 2 * depth].T)
    return torch.from_numpy(sums)


def _draw(*shape: int, exponents: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    scales = torch.randint(-exponents, 1, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), scales).bfloat16()


# 75: products and sums, some inputs too, are often subnormal
@pytest.mark.parametrize("exponents", [1, 75])
@pytest.mark.parametrize("num_inputs", [1, 31, 32, 33, 40, 130, 301])
def test_pairs_are_multiplied_as_the_manual_says(
    amx: Kernels, num_inputs: int, exponents: int
) -> None:
    x, weight = (
        _draw(37, num_inputs, exponents=exponents),
        _draw(50, num_inputs, exponents=exponents),
    )
    if exponents > 1:
        x[:, ::5] *= 2.0**-60
    want, packed = _product(x, weight), amx.pack_linear(weight)
    for rows in (slice(0, 37), slice(3, 4), slice(5, 21), slice(2, 19)):
        got = amx.linear(x[rows].contiguous(), packed, out_dtype="float32")
        assert torch.equal(got.double(), want[rows]), rows


def test_the_instruction_is_used_for_one_row(amx: Kernels) -> None:
    """Chains of first and of second numbers, and one chain through both, differ in bits."""
    x, weight = _draw(1, 256, exponents=1), _draw(64, 256, exponents=1)
    got = amx.linear(x, amx.pack_linear(weight), out_dtype="float32")
    cpu.set_isa("avx512bf16emulated")
    assert not torch.equal(got, amx.linear(x, amx.pack_linear(weight), out_dtype="float32"))


@pytest.mark.parametrize("num_rows", [14, 15, 16, 17, 33])
def test_sums_of_bytes_may_leave_32_bits_on_the_way(
    amx: Kernels, reference: Kernels, num_rows: int
) -> None:
    """Unsigned weights' sums exceed 2^31 where the signed ones' do not."""
    num_inputs = 70_000
    values = torch.full((3, num_inputs), 127, dtype=torch.int8)
    values[1] = -128
    weight = QuantizedWeight(values, torch.full((3, 1), 2.0**-20), None, 8, num_inputs, "int8")
    x = torch.ones(num_rows, num_inputs)
    x[3], x[5, ::3] = -1.0, 0.25
    want = reference.linear(x[:6].contiguous(), reference.pack_quantized(weight))
    got = amx.linear(x, amx.pack_quantized(weight))
    assert torch.equal(got[:6], want)
    assert torch.equal(got[6:], want[:1].expand(num_rows - 6, -1))


@pytest.mark.parametrize("group_size", [96, 32])
@pytest.mark.parametrize("bits", [8, 4])
def test_integers_are_the_same_in_tiles_of_any_height(
    amx: Kernels, reference: Kernels, bits: int, group_size: int
) -> None:
    """Through VNNI up to some rows, then in tiles of even height,
    the last one with rows that mean nothing."""
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(-8, 8, (70, 96), generator=generator, dtype=torch.int8)
    scales = torch.rand(70, 96 // group_size, generator=generator)
    weight = QuantizedWeight(values, scales, None, bits, group_size, "int8")  # type: ignore[arg-type]
    x = torch.randn(70, 96, generator=generator)
    want, packed = reference.linear(x, reference.pack_quantized(weight)), amx.pack_quantized(weight)
    for num_rows in (1, 3, 4, 5, 14, 15, 17, 32, 33, 35, 50, 70):
        assert torch.equal(amx.linear(x[:num_rows], packed), want[:num_rows]), num_rows


@pytest.mark.parametrize("num_outputs", [2048, 2080, 2072])
@pytest.mark.parametrize("is_integer", [False, True])
def test_outputs_past_the_caches_are_the_same(
    amx: Kernels, is_integer: bool, num_outputs: int
) -> None:
    """An even and an odd number of whole lines to a row, and rows that end within one,
    which are stored as ever."""
    x = _draw(1056, 32, exponents=4).to(torch.bfloat16)
    weight, bias = (
        _draw(num_outputs, 32, exponents=4).to(torch.bfloat16),
        _draw(num_outputs, exponents=2).float(),
    )
    values = torch.randint(
        -127, 128, (num_outputs, 32), generator=torch.Generator().manual_seed(1), dtype=torch.int8
    )
    quantized = QuantizedWeight(values, torch.rand(num_outputs, 1) + 0.5, None, 8, 32, "int8")
    packed = amx.pack_quantized(quantized, bias) if is_integer else amx.pack_linear(weight, bias)
    # so many stay in the caches
    few = torch.cat([amx.linear(part, packed) for part in torch.split(x, 176)])
    assert few.nbytes >= 4 << 20
    assert torch.equal(amx.linear(x, packed).view(torch.int16), few.view(torch.int16))


def _bits(kernels: Kernels, num_rows: int, num_inputs: int) -> list[Tensor]:
    """What products of several kinds come to."""
    x, weight = _draw(num_rows, num_inputs, exponents=75), _draw(70, num_inputs, exponents=40)
    values = torch.randint(
        -8, 8, (70, num_inputs), generator=torch.Generator().manual_seed(1), dtype=torch.int8
    )
    results = [kernels.linear(x, kernels.pack_linear(weight), out_dtype="float32")]
    for bits, size in ((8, num_inputs), (4, num_inputs), (4, 32)):
        scales = torch.rand(70, num_inputs // size, generator=torch.Generator().manual_seed(2))
        quantized = QuantizedWeight(values, scales, None, bits, size, "int8")  # type: ignore[arg-type]
        results.append(kernels.linear(x.float(), kernels.pack_quantized(quantized)))
    return results


@pytest.mark.parametrize("name", ["avx512bf16", "amx"])
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 64), (17, 96), (40, 1344), (300, 160)])
def test_a_processor_gives_the_bits_of_the_twin(
    amx: Kernels, name: str, num_rows: int, num_inputs: int
) -> None:
    if name not in cpu.supported_isas():
        pytest.skip(f"this processor has no {name}")
    cpu.set_isa(f"{name}emulated")
    want = _bits(amx, num_rows, num_inputs)
    cpu.set_isa(name)
    for index, (got, acted) in enumerate(zip(_bits(amx, num_rows, num_inputs), want, strict=True)):
        assert torch.equal(got, acted), index


@pytest.mark.parametrize("name", [NAME, "amx"])
@pytest.mark.parametrize("scale", [1e-41, 1.0])
def test_outputs_that_the_instruction_does_not_round(amx: Kernels, name: str, scale: float) -> None:
    """It takes subnormal numbers as zero and leaves what a not-a-number says."""
    if name not in cpu.supported_isas() + cpu.emulated_isas():
        pytest.skip(f"this processor has no {name}")
    x, values = (
        _draw(40, 64, exponents=1),
        torch.arange(70 * 64, dtype=torch.int32).remainder(255).sub(127).to(torch.int8),
    )
    x[7, 3], x[20, 5] = torch.inf, torch.nan
    weight = QuantizedWeight(values.view(70, 64), torch.full((70, 1), scale), None, 8, 64, "int8")
    results = []
    for isa in ("avx512vnni", name):
        cpu.set_isa(isa)
        results.append(amx.linear(x, amx.pack_quantized(weight)).view(torch.int16))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["avx512bf16", "amx"])
@pytest.mark.parametrize("exponents", [1, 75])
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize(
    ("lens", "heads", "head_size"),
    [(((70, 150), (1, 90), (2, 33)), (4, 2), 64), (((40, 40),), (9, 1), 80)],
)
def test_a_processor_attends_as_the_twin_does(
    amx: Kernels,
    paged: type[Paged],
    name: str,
    lens: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    head_size: int,
    kv_format: str,
    exponents: int,
) -> None:
    """Many rows and few; where many numbers are subnormal, too."""
    if name not in cpu.supported_isas():
        pytest.skip(f"this processor has no {name}")
    case = paged.random(lens, heads[1], head_size, torch.bfloat16)
    for each in (*case.keys, *case.values):
        each.mul_(2.0**-exponents)
    query = _draw(sum(count for count, _ in lens), heads[0], head_size, exponents=exponents)
    key_cache, value_cache, batch = case.pages(16, kv_format)
    bits = []
    for isa in (f"{name}emulated", name):
        cpu.set_isa(isa)
        bits.append(
            amx.paged_attention(query, key_cache, value_cache, batch, scale=head_size**-0.5).view(
                torch.int16
            )
        )
    assert torch.equal(*bits)


@pytest.mark.parametrize("isa", [NAME, "avx512bf16emulated"])
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
@pytest.mark.parametrize("exponents", [1, 60])
@pytest.mark.parametrize("num_heads", [1, 2, 4, 5])
def test_a_row_alone_has_the_bits_that_it_has_among_many(
    amx: Kernels, paged: type[Paged], num_heads: int, exponents: int, kv_format: str, isa: str
) -> None:
    """Alone it reads the cache by itself; with many, what was gathered of it for all of them."""
    cpu.set_isa(isa)
    num_tokens = 150
    case = paged.random(((num_tokens, num_tokens),), 1, 64, torch.bfloat16)
    case.values[0].mul_(2.0**-exponents)
    query = _draw(num_tokens, num_heads, 64, exponents=exponents)
    key_cache, value_cache, batch = case.pages(16, kv_format)
    want = amx.paged_attention(query, key_cache, value_cache, batch, scale=0.125)
    for position in (0, 63, 64, 100, 149):
        alone = replace(
            case,
            lens=((1, position + 1),),
            keys=(case.keys[0][: position + 1],),
            values=(case.values[0][: position + 1],),
        )
        key_cache, value_cache, batch = alone.pages(16, kv_format)
        row = query[position : position + 1].contiguous()
        got = amx.paged_attention(row, key_cache, value_cache, batch, scale=0.125)
        assert torch.equal(got[0].view(torch.int16), want[position].view(torch.int16)), position
