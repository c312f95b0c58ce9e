"""Triton's paged attention against the reference, and the bits that nothing may change."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernel_cases import thorough
from torch import Tensor

from quire.kernels.interface import AttentionBatch, Kernels, SharedPrefixes
from quire.worker.prefixes import PrefixRun, run_arrays

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from quire.kernels.triton import attention
from quire.kernels.triton.kernels import TritonKernels

if TYPE_CHECKING:
    from tests.kernels.conftest import Paged

Attend = Callable[..., Tensor]
SINKS = torch.tensor([0.5, 3.0, -90.0, 90.0, -1.0, 0.0])
"""Of each head: among its scores, and far from them on both sides."""
RAGGED = ((1, 1), (5, 5), (18, 40), (1, 150), (2, 33))
"""Prefill chunks and decodes, contexts of one token, of many blocks and of several splits."""


def draw_query(case: Paged, num_heads: int) -> Tensor:
    num_tokens = sum(count for count, _ in case.lens)
    shape = (num_tokens, num_heads, case.keys[0].shape[2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(case.keys[0].dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    near = {torch.float32: (3e-6, 1e-4), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}[
        want.dtype
    ]
    torch.testing.assert_close(got, want, atol=near[0], rtol=near[1])


@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"),
    [
        thorough((4, 2), 64, torch.float32),
        pytest.param((3, 3), 80, torch.bfloat16, marks=pytest.mark.slow),
        thorough((9, 1), 128, torch.bfloat16),
        thorough((2, 1), 256, torch.bfloat16),
        ((6, 2), 40, torch.float32),
    ],
)
def test_it_agrees_with_the_reference(
    kernels: Kernels,
    reference: Kernels,
    paged: type[Paged],
    attend: Attend,
    heads: Any,
    head_size: int,
    dtype: torch.dtype,
) -> None:
    case = paged.random(RAGGED, heads[1], head_size, dtype)
    query = draw_query(case, heads[0])
    assert_near(attend(kernels, case, query), attend(reference, case, query))


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_what_is_behind_the_window_may_be_anything(
    kernels: Kernels, paged: type[Paged], device: torch.device, kv_format: str
) -> None:
    """Other sequences' numbers, also such that are not finite, in blocks that were given back."""
    case = paged.random(((1, 90), (18, 60)), 2, 40, torch.bfloat16)
    query, answers = draw_query(case, 4).to(device), []
    for is_given_back in (False, True):
        keys, values, batch = case.pages(16, kv_format)
        if is_given_back:
            case.give_back(20, (keys, values), batch)
        moved = replace(
            batch,
            query_start=batch.query_start.to(device),
            context_len=batch.context_len.to(device),
            block_tables=batch.block_tables.to(device),
        )
        answers.append(
            kernels.paged_attention(
                query, keys.to(device), values.to(device), moved, scale=0.2, window=20
            )
        )
    assert answers[0].isfinite().all() and torch.equal(*answers)


@pytest.mark.slow_except("options3", "options5")
@pytest.mark.parametrize(
    "options",
    [
        {"window": 40},
        {"window": 1},
        {"soft_cap": 5.0},
        {"window": 33, "soft_cap": 2.0},
        {"sinks": SINKS},
        {"window": 33, "sinks": SINKS.bfloat16()},
    ],
)
def test_options_agree_with_the_reference(
    kernels: Kernels,
    reference: Kernels,
    paged: type[Paged],
    attend: Attend,
    options: dict[str, Any],
) -> None:
    case = paged.random(RAGGED, 2, 32)
    query = draw_query(case, 6)
    here = {
        key: value.to(kernels.device) if key == "sinks" else value for key, value in options.items()
    }
    assert_near(attend(kernels, case, query, **here), attend(reference, case, query, **options))


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, thorough(torch.bfloat16)])
def test_quantized_caches_agree_with_the_reference(
    kernels: Kernels,
    reference: Kernels,
    paged: type[Paged],
    attend: Attend,
    kv_format: str,
    dtype: torch.dtype,
) -> None:
    case = paged.random(((3, 5), (1, 90)), 2, 20, dtype)
    query = draw_query(case, 4)
    got = attend(kernels, case, query, 4, kv_format=kv_format, window=70)
    assert_near(got, attend(reference, case, query, kv_format=kv_format, window=70))
    assert not torch.allclose(got, attend(reference, case, query, window=70), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_instructions_for_fp8_give_the_bits_of_integers(
    kernels: Kernels,
    paged: type[Paged],
    attend: Attend,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(kernels, TritonKernels)
    if kernels.device.type == "cuda" and not kernels.options.has_fp8:
        pytest.skip("no instructions for e4m3")
    results = []
    for has_fp8 in (False, True):
        monkeypatch.setattr(kernels, "options", replace(kernels.options, has_fp8=has_fp8))
        case = paged.random(((3, 5), (1, 90)), 2, 20, dtype)
        results.append(attend(kernels, case, draw_query(case, 4), 4, kv_format="fp8"))
    assert torch.equal(*results) and results[0].isfinite().all()


def test_more_query_heads_than_one_tile_holds(
    kernels: Kernels, reference: Kernels, paged: type[Paged], attend: Attend
) -> None:
    case = paged.random(((3, 40),), 1, 16)
    query = draw_query(case, 71)
    assert_near(attend(kernels, case, query), attend(reference, case, query))


@pytest.mark.slow
@pytest.mark.parametrize("window", [thorough(None), 50])
def test_the_block_size_changes_no_bit(
    kernels: Kernels, paged: type[Paged], attend: Attend, window: int | None
) -> None:
    case = paged.random(RAGGED, 1, 32)
    query = draw_query(case, 2)
    results = [attend(kernels, case, query, size, window=window) for size in (4, 16, 128, 5)]
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.slow_except("1-*")
@pytest.mark.parametrize(
    ("chunk", "window", "sinks"),
    [(1, None, SINKS[:2]), (7, 45, None), thorough(1, None, None), thorough(32, None, SINKS[2:4])],
)
def test_chunking_changes_no_bit(
    kernels: Kernels,
    paged: type[Paged],
    attend: Attend,
    chunk: int,
    window: int | None,
    sinks: Tensor | None,
) -> None:
    """Chunks of one are decodes: their splits are computed side by side and merged."""
    whole = paged.random(((100, 100),), 1, 32)
    query = draw_query(whole, 2)
    options = {"window": window, "sinks": None if sinks is None else sinks.to(kernels.device)}
    want = attend(kernels, whole, query, **options)
    for start in range(0, 100, chunk * max(1, 12 // chunk)):
        end = min(100, start + chunk)
        part = replace(
            whole,
            lens=((end - start, end),),
            keys=(whole.keys[0][:end],),
            values=(whole.values[0][:end],),
        )
        assert torch.equal(attend(kernels, part, query[start:end], **options), want[start:end]), (
            start
        )


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_size"), [((12, 3), 32), thorough((8, 2), 256)])
@pytest.mark.parametrize("kv_format", [None, thorough("fp8")])
def test_neither_height_of_tile_nor_splits_side_by_side_change_a_bit(
    kernels: Kernels,
    paged: type[Paged],
    attend: Attend,
    heads: tuple[int, int],
    head_size: int,
    kv_format: str | None,
) -> None:
    """A prompt of several splits in one piece fills tall tiles, whose programs go through them;
    its end comes in chunks."""
    assert isinstance(kernels, TritonKernels)
    tuning = kernels.tuning
    figures = tuning.wide_attention if head_size > 128 else tuning.attention
    length = 3 * figures.split_len - figures.split_len // 8
    whole = paged.random(((length, length),), heads[1], head_size, torch.bfloat16)
    query = draw_query(whole, heads[0])
    num_programs = length * (heads[0] // heads[1]) // figures.tall.block_m * heads[1]
    assert num_programs >= attention.PROGRAMS_AT_ONCE * tuning.num_programs, (
        "the whole prompt is to be computed without splits"
    )
    want = attend(kernels, whole, query, kv_format=kv_format)
    for count, end in (
        (1, length),
        (1, length - figures.split_len),
        (figures.low.block_m // 2 + 3, length),
    ):
        part = replace(
            whole,
            lens=((count, end),),
            keys=(whole.keys[0][:end],),
            values=(whole.values[0][:end],),
        )
        got = attend(kernels, part, query[end - count : end], kv_format=kv_format)
        assert torch.equal(got, want[end - count : end]), (count, end)


def test_company_changes_no_bit(kernels: Kernels, paged: type[Paged], attend: Attend) -> None:
    case = paged.random(RAGGED, 2, 32, torch.bfloat16)
    query = draw_query(case, 6)
    together, start = attend(kernels, case, query), 0
    for index, (count, context) in enumerate(RAGGED):
        alone = replace(
            case, lens=((count, context),), keys=(case.keys[index],), values=(case.values[index],)
        )
        assert torch.equal(
            attend(kernels, alone, query[start : start + count]), together[start : start + count]
        ), index
        start += count


@pytest.mark.parametrize("kv_format", ["float32", thorough("int8")])
def test_a_shared_prefix_read_once_changes_no_bit(
    kernels: Kernels,
    paged: type[Paged],
    move: Callable[[Any], Any],
    kv_format: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three sequences, the second and third begin with the same blocks."""
    unit = kernels.shared_prefix_unit
    assert unit is not None
    case = paged.random(((1, unit + 6), (1, 2 * unit + 12), (3, 2 * unit + 22)), 1, 16)
    query = draw_query(case, 2).to(kernels.device)
    keys, values, batch = case.pages(16, kv_format)
    num_blocks = 2 * unit // 16
    batch.block_tables[2, :num_blocks] = batch.block_tables[1, :num_blocks]
    runs = [PrefixRun(0, 1, 0), PrefixRun(1, 3, num_blocks)]
    arrays = run_arrays(runs, batch.block_tables.numpy(), batch.query_start.tolist(), 16)
    shared = move(SharedPrefixes(*map(torch.from_numpy, arrays)))
    keys, values, batch = keys.to(kernels.device), values.to(kernels.device), move(batch)
    options: dict[str, Any] = {"scale": 0.25, "sinks": SINKS[:2].to(kernels.device)}
    want = kernels.paged_attention(query, keys, values, batch, **options)
    too_much = replace(batch, shared=shared, block_tables=batch.block_tables.clone())
    # the run's own table is read there
    batch.block_tables[2, :num_blocks] = batch.block_tables[0, 0]
    got = kernels.paged_attention(query, keys, values, replace(batch, shared=shared), **options)
    assert torch.equal(got, want)
    monkeypatch.setattr("quire.kernels.triton.attention.MAX_PARTIAL_BYTES", 1)
    assert torch.equal(kernels.paged_attention(query, keys, values, too_much, **options), want)


def test_non_finite_values_stay_with_their_sequence(
    kernels: Kernels, paged: type[Paged], attend: Attend
) -> None:
    case = paged.random(((20, 20), (20, 20)), 1, 16)
    query = draw_query(case, 2)
    clean = attend(kernels, case, query)
    case.values[0][10], case.keys[0][10] = float("inf"), float("nan")
    got = attend(kernels, case, query)
    assert got[10:20].isnan().all()
    assert torch.equal(got[20:], clean[20:])


def test_large_scores_do_not_overflow(
    kernels: Kernels, reference: Kernels, paged: type[Paged], attend: Attend
) -> None:
    case = paged.random(((8, 80),), 1, 32)
    query = draw_query(case, 2) * 300
    torch.testing.assert_close(
        attend(kernels, case, query), attend(reference, case, query), atol=1e-3, rtol=1e-3
    )


def test_the_query_may_be_a_view_and_the_cache_of_another_dtype(
    kernels: Kernels, reference: Kernels, paged: type[Paged], attend: Attend, device: torch.device
) -> None:
    case = paged.random(((4, 30), (1, 9)), 2, 16, torch.bfloat16)
    wide = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(1)).to(device)
    got = attend(kernels, case, wide[:, 1:5])
    assert got.dtype == torch.float32
    keys, values, batch = case.pages(16)
    want = reference.paged_attention(
        wide[:, 1:5].cpu().contiguous(), keys.float(), values.float(), batch, scale=0.25
    )
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-4)


def test_an_empty_batch(kernels: Kernels, device: torch.device) -> None:
    cache, none = (
        torch.zeros(2, 1, 16, 8, device=device),
        torch.zeros(0, dtype=torch.int32, device=device),
    )
    zero, tables = torch.zeros(1, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32)
    batch = AttentionBatch(zero.to(device), none, tables.to(device), none.long(), none.long(), 0, 0)
    assert kernels.paged_attention(
        torch.empty(0, 1, 8, device=device), cache, cache, batch, scale=1.0
    ).shape == (0, 1, 8)


def test_wrong_batches_are_refused(kernels: Kernels, paged: type[Paged]) -> None:
    case = paged.random(((2, 20),), 1, 16)
    query = draw_query(case, 2)
    keys, values, batch = case.pages(16)
    with pytest.raises(TypeError, match="expected int32"):
        kernels.paged_attention(
            query, keys, values, replace(batch, context_len=torch.tensor([20])), scale=1.0
        )
    with pytest.raises(ValueError, match="does not fit a cache"):
        kernels.paged_attention(torch.zeros(2, 2, 8), keys, values, batch, scale=1.0)
    with pytest.raises(TypeError, match="use bfloat16"):
        narrow = torch.zeros(5, 1, 16, 20, dtype=torch.int8)
        kernels.paged_attention(query.half(), narrow, narrow.clone(), batch, scale=1.0)
    with pytest.raises(ValueError, match="window=0"):
        kernels.paged_attention(query, keys, values, batch, scale=1.0, window=0)
    with pytest.raises(ValueError, match=r"scale=-0\.5 must be above zero"):
        kernels.paged_attention(query, keys, values, batch, scale=-0.5)
