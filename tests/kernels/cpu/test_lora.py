"""Adapters' kernels: every instruction set gives the reference's numbers, and a row's bits depend on nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.kernels.lora import LoraPart, LoraWeight, StepAdapters
from quire.kernels.reference import lora as reference

cpu = pytest.importorskip("quire.kernels.cpu")
_native = pytest.importorskip("quire.kernels.cpu._native")
from quire.kernels.cpu import lora  # noqa: E402

NUM_INPUTS, PARTS = 83, (70, 128, 5)
"""Neither whole vectors nor whole panels."""
RANKS = (1, 4, 5, 16, 64, 256)


@pytest.fixture(params=_native.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with cpu.using(isa=request.param):
        yield request.param


def _weight(rank: int, dtype: torch.dtype, seed: int) -> LoraWeight:
    """Three parts, of which the second has a rank of its own and the third shares the first one's.
    The second has a bias, and the third one in place of another."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    other = 3
    biases = [draw(size).float() for size in (*PARTS[1:], *PARTS[2:])]
    parts = (
        LoraPart(0, 0, draw(PARTS[0], rank)),
        LoraPart(PARTS[0], rank, draw(PARTS[1], other), biases[0]),
        LoraPart(PARTS[0] + PARTS[1], 0, draw(PARTS[2], rank), biases[1], biases[2]),
    )
    scales = torch.linspace(0.5, 2.0, rank + other)
    return LoraWeight(draw(rank + other, NUM_INPUTS), scales, parts, sum(PARTS))


def _step(dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor, list[int]]:
    generator = torch.Generator().manual_seed(99)
    x = torch.randn((num_rows, NUM_INPUTS), generator=generator).to(dtype)
    y = torch.randn((num_rows, sum(PARTS)), generator=generator).to(dtype)
    return x, y, [row % (len(RANKS) + 1) - 1 for row in range(num_rows)]


def _adapted(x: Tensor, y: Tensor, packed: list[lora.CpuAdapter], of_token: list[int]) -> Tensor:
    y = y.clone()
    lora.add_lora(y, x, StepAdapters(tuple(packed), torch.tensor(of_token, dtype=torch.int32)), 2)
    return y


def _adapters(dtype: torch.dtype) -> list[dict[int, LoraWeight]]:
    return [{2: _weight(rank, dtype, rank)} for rank in RANKS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_different_ranks_share_a_step_and_equal_the_reference(
    isa: str, dtype: torch.dtype
) -> None:
    x, y, of_token = _step(dtype, 50)
    adapters = _adapters(dtype)
    found = _adapted(x, y, [lora.pack_adapter(each, 3) for each in adapters], of_token)
    expected = y.clone()
    packed = tuple(reference.pack_adapter(each, 3) for each in adapters)
    step = StepAdapters(packed, torch.tensor(of_token, dtype=torch.int32))
    reference.add_lora(expected, x, step, 2)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    alone = [row for row, index in enumerate(of_token) if index < 0]
    assert torch.equal(found[alone], y[alone])
    others = [row for row, index in enumerate(of_token) if index >= 0]
    assert not (found[others] == y[others]).all(dim=1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rows_bits_depend_on_the_row_and_its_adapter_alone(
    isa: str, dtype: torch.dtype, num_threads: int
) -> None:
    x, y, of_token = _step(dtype, 150)
    packed = [lora.pack_adapter(each, 3) for each in _adapters(dtype)]
    with cpu.using(num_threads=num_threads):
        together = _adapted(x, y, packed, of_token)
    for row in range(0, 150, 7):
        if of_token[row] >= 0:
            alone = _adapted(x[row : row + 1], y[row : row + 1], [packed[of_token[row]]], [0])
            assert torch.equal(together[row], alone[0]), row
    same = _adapted(x, y, packed[:1], [0] * 150)
    assert torch.equal(same[1::7], together[1::7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_get_the_row_of_their_token(isa: str, dtype: torch.dtype) -> None:
    """`down` is a table of tokens, read by their ids."""
    _, y, of_token = _step(dtype, 50)
    ids = torch.randint(NUM_INPUTS, (50,), generator=torch.Generator().manual_seed(4))
    adapters = [{2: _weight(rank, dtype, rank)._replace(is_embedding=True)} for rank in RANKS]
    found, expected = y.clone(), y.clone()
    indices = torch.tensor(of_token, dtype=torch.int32)
    for kernels, out in ((lora, found), (reference, expected)):
        packed = tuple(kernels.pack_adapter(each, 3) for each in adapters)
        kernels.add_lora_embedding(out, ids, StepAdapters(packed, indices), 2)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[::7], y[::7]) and not torch.equal(found, y)
    for row in (1, 6, 20):
        alone = y[row : row + 1].clone()
        own = (lora.pack_adapter(adapters[of_token[row]], 3),)
        lora.add_lora_embedding(
            alone, ids[row : row + 1], StepAdapters(own, torch.zeros(1, dtype=torch.int32)), 2
        )
        assert torch.equal(alone[0], found[row])
    with pytest.raises(IndexError, match="outside an embedding of 83 rows"):
        lora.add_lora_embedding(
            found, ids + NUM_INPUTS, StepAdapters(packed_of(adapters), indices), 2
        )


def packed_of(adapters: list[dict[int, LoraWeight]]) -> tuple[lora.CpuAdapter, ...]:
    """All of them, packed."""
    return tuple(lora.pack_adapter(each, 3) for each in adapters)


def test_some_columns_get_what_they_get_with_all_others(isa: str) -> None:
    x, y, of_token = _step(torch.float32, 20)
    packed = tuple(lora.pack_adapter(each, 3) for each in _adapters(torch.float32))
    step = StepAdapters(packed, torch.tensor(of_token, dtype=torch.int32))
    whole = y.clone()
    lora.add_lora(whole, x, step, 2)
    for first, end in ((0, PARTS[0]), (PARTS[0], sum(PARTS))):
        part = y[:, first:end].contiguous()
        lora.add_lora(part, x, step, 2, first)
        assert torch.equal(part, whole[:, first:end])


def test_rows_that_name_no_adapter_of_the_step_are_refused() -> None:
    x, y, _ = _step(torch.float32, 3)
    packed = [lora.pack_adapter(_adapters(torch.float32)[0], 3)]
    with pytest.raises(ValueError, match="names adapter 1 of 1"):
        _adapted(x, y, packed, [0, 1, -1])


def test_an_adapter_for_another_width_is_refused() -> None:
    x, y, _ = _step(torch.float32, 3)
    packed = [lora.pack_adapter(_adapters(torch.float32)[0], 3)]
    with pytest.raises(ValueError, match="another width"):
        _adapted(x[:, :-1].contiguous(), y, packed, [0, 0, 0])
