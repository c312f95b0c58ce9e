"""Triton's sampling gives the reference's bits."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
from kernel_cases import thorough
from sampling_cases import make_filters, make_keys, make_logits, make_penalties, make_rows
from torch import Tensor

from quire.core.plan import RowSampling
from quire.kernels.interface import Kernels
from quire.kernels.reference.sampling import ReferenceSampling
from quire.kernels.sampling import Filters, SamplingKernels, ScaledRows
from quire.sampling import SampledRow, Sampler, select_sampling
from quire.sampling.plain import choose_plain
from quire.worker.outlets.tokens import greedy_results

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from quire.kernels.triton import sampling as triton_sampling
from quire.kernels.triton import threshold_search

REFERENCE = ReferenceSampling()


@pytest.fixture
def sampling(kernels: Kernels) -> SamplingKernels:
    return triton_sampling.TritonSampling()


def there(record: Any, device: torch.device) -> Any:
    """A tensor, or a record of tensors, on the device."""
    if isinstance(record, Tensor) or record is None:
        return None if record is None else record.to(device)
    return type(record)(*(getattr(record, field.name).to(device) for field in fields(record)))


def test_argmax(sampling: SamplingKernels, device: torch.device) -> None:
    logits = make_logits(6, 2051)
    logits[1] = -math.inf
    logits[2, 2049] = math.inf
    logits[3, -1] = math.nan
    (ids, values), (expected_ids, expected) = (
        sampling.argmax(logits.to(device)),
        REFERENCE.argmax(logits),
    )
    assert torch.equal(
        values.cpu().nan_to_num(nan=123.0, posinf=1e38), expected.nan_to_num(nan=123.0, posinf=1e38)
    )
    sound = expected.isfinite()
    assert torch.equal(ids.cpu()[sound], expected_ids[sound])


CASES = [
    ((2, 5), 2),
    ((1, 2051), 5),
    thorough((1, 4099), 5),
    thorough((1, 1), 1),
    thorough((2, 65), 3),
    thorough((1, 1000), 4),
]


@pytest.mark.slow_except("shape0-*")
@pytest.mark.parametrize(("shape", "seed"), CASES)
def test_thresholds_draws_and_scores(
    sampling: SamplingKernels, device: torch.device, shape: tuple[int, int], seed: int
) -> None:
    logits = make_logits(*shape, seed)
    rows = make_rows(logits, seed)
    count = len(rows.row)
    filters, keys = make_filters(count, shape[1], seed), make_keys(count, seed)
    args = (there(logits, device), there(rows, device))
    expected = REFERENCE.thresholds(logits, rows, filters)
    thresholds = sampling.thresholds(*args, there(filters, device))
    assert torch.equal(thresholds.value.cpu(), expected.value) and torch.equal(
        thresholds.token_id.cpu(), expected.token_id
    )
    for limit, ours in ((expected, thresholds), (None, None)):
        drawn = REFERENCE.draw(logits, rows, limit, keys)
        assert torch.equal(sampling.draw(*args, ours, there(keys, device)).cpu(), drawn)
        num_top = min(20, shape[1])
        scores = sampling.score(*args, ours, drawn.to(device), num_top=num_top)
        wanted = REFERENCE.score(logits, rows, limit, drawn, num_top=num_top)
        assert all(
            torch.equal(mine.cpu(), theirs) for mine, theirs in zip(scores, wanted, strict=True)
        )


@pytest.mark.slow
def test_draws_and_scores_do_not_depend_on_chunks(
    sampling: SamplingKernels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many of one block, some of several, and one of all."""
    logits = make_logits(3, 300, 11)
    logits[1], logits[1, [5, 190]] = -math.inf, 4.0  # equals, far from each other
    rows, keys = make_rows(logits, 11), make_keys(len(make_rows(logits, 11).row), 11)
    drawn = REFERENCE.draw(logits, rows, None, keys)
    wanted = REFERENCE.score(logits, rows, None, drawn, num_top=3)
    monkeypatch.setattr(triton_sampling, "_DRAW_BLOCK", 16)
    monkeypatch.setattr(triton_sampling, "_BLOCK", 64)
    args = (there(logits, device), there(rows, device), None)
    for num_programs in (100, 8, 1):
        monkeypatch.setattr(threshold_search, "NUM_PROGRAMS", num_programs)
        assert torch.equal(sampling.draw(*args, there(keys, device)).cpu(), drawn)
        scores = sampling.score(*args, drawn.to(device), num_top=3)
        assert all(
            torch.equal(mine.cpu(), theirs) for mine, theirs in zip(scores, wanted, strict=True)
        )


def check_thresholds(
    sampling: SamplingKernels,
    device: torch.device,
    logits: Tensor,
    rows: ScaledRows,
    filters: Filters,
) -> None:
    """Thresholds have the reference's bits; what is not a number is never kept."""
    thresholds = sampling.thresholds(
        there(logits, device), there(rows, device), there(filters, device)
    )
    expected = REFERENCE.thresholds(logits.masked_fill(logits.isnan(), -math.inf), rows, filters)
    assert torch.equal(thresholds.token_id.cpu(), expected.token_id) and torch.equal(
        thresholds.value.cpu(), expected.value
    )


ODD_ROWS = [
    ([0.0, -0.0, 1.0, -0.0, 1.0], 1.0),
    ([-math.inf, 3.0, -math.inf], 1e5),
    ([-3e38, 0.5, 0.5, 0.5, 0.25], 1e-4),
]


@pytest.mark.parametrize(("values", "scale"), ODD_ROWS)
def test_odd_rows(
    sampling: SamplingKernels, device: torch.device, values: list[float], scale: float
) -> None:
    logits = torch.tensor([values])
    rows = ScaledRows(
        torch.zeros(2, dtype=torch.int64), logits.max().repeat(2), torch.full((2,), scale)
    )
    top_k = torch.tensor([2, 5]).clamp(max=len(values))
    filters = Filters(top_k, torch.tensor([1.0, 0.6]).double(), torch.full((2,), -math.inf))
    check_thresholds(sampling, device, logits, rows, filters)


def test_a_top_p_of_nothing_keeps_the_best(
    sampling: SamplingKernels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is one of more equals than can be gathered, too."""
    logits = torch.zeros(1, 90)
    logits[0, 0] = -1.0
    rows = ScaledRows(torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.ones(2))
    filters = Filters(
        torch.tensor([90, 10]), torch.zeros(2, dtype=torch.float64), torch.full((2,), -math.inf)
    )
    for capacity in (2048, 16):
        monkeypatch.setattr(threshold_search, "CAPACITY", capacity)
        check_thresholds(sampling, device, logits, rows, filters)


SIZE = 200


def make_shapes() -> Tensor:
    """Rows [12, SIZE] of many shapes, for chunks of 64."""
    logits = make_logits(12, SIZE, seed=7).clamp(min=-20.0)
    logits[1] = 2.5
    logits[2], logits[2, 130] = -1.0, 11.0
    logits[3, 50:150] = 7.0  # across the borders of chunks, and more than can be gathered
    logits[3, [63, 64, 127, 128]] = 7.5
    logits[4], logits[4, 199] = -math.inf, -3.0
    logits[5, ::3] = math.nan
    logits[5, 1] = -math.inf
    logits[6], logits[6, 77] = -3e38, 3e38
    logits[7] = torch.where(torch.arange(SIZE) % 2 == 0, 0.0, -0.0)
    logits[8] = 1.0 + torch.arange(SIZE) % 37 * 2.0**-23  # neighbours as float32
    logits[9] = 20.0 - torch.arange(SIZE) * 0.25
    logits[10] = logits[10].bfloat16().float() * 0.01
    logits[11] = torch.arange(SIZE) * 0.01 - 200.0
    logits[11, 3] = 0.0  # all others far away
    return logits


KINDS = [  # top-k, top-p, floor
    *(
        (SIZE, 1.0, -math.inf),
        (1, 1.0, -math.inf),
        (1, 0.5, -math.inf),
        (SIZE - 1, 1.0, -math.inf),
        (SIZE, 1e-9, -math.inf),
    ),
    *(
        (SIZE, 1.0 - 2.0**-53, -math.inf),
        (SIZE, 0.9, -math.inf),
        (SIZE, 0.5, -5.0),
        (20, 0.9, -math.inf),
        (20, 1.0, -5.0),
    ),
    *(
        (150, 0.999, -math.inf),
        (150, 0.9, -5.0),
        (SIZE, 1.0, -5.0),
        (SIZE, 1.0, 0.0),
        (20, 1e-9, 0.0),
        (70, 1.0, -math.inf),
    ),
]
SPREADS = [(2048, 1024), (16, 1)]
"""Room for all candidates and a program for each block of a row;
room for a few and a program for all blocks."""


@pytest.fixture(params=SPREADS)
def chunks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, sampling: SamplingKernels
) -> None:
    """Small blocks, so that small rows have several."""
    capacity, num_programs = request.param
    monkeypatch.setattr(threshold_search, "BLOCK", 64)
    monkeypatch.setattr(threshold_search, "CAPACITY", capacity)
    monkeypatch.setattr(threshold_search, "NUM_PROGRAMS", num_programs)
    monkeypatch.setattr(triton_sampling, "_BLOCK", 64)


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("step", [11, thorough(3)])
def test_thresholds_in_chunks(sampling: SamplingKernels, device: torch.device, step: int) -> None:
    logits = make_shapes()
    asked = list(product(range(len(logits)), KINDS))[::step]
    top_k, top_p, floor = zip(*(kind for _, kind in asked), strict=True)
    filters = Filters(
        torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(floor)
    )
    row = torch.tensor([place for place, _ in asked])
    scale = torch.tensor([1.0, 0.3, 2.0]).repeat(len(asked))[: len(asked)]
    max_logit = logits.masked_fill(logits.isnan(), -math.inf).max(dim=1).values
    check_thresholds(sampling, device, logits, ScaledRows(row, max_logit[row], scale), filters)


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("count", [20, thorough(1), thorough(SIZE)])
def test_the_best_in_chunks(sampling: SamplingKernels, device: torch.device, count: int) -> None:
    logits = make_shapes()
    row = torch.tensor([0, 2, 3, 4, 6, 7, 8])
    rows, chosen = (
        ScaledRows(row, logits.max(dim=1).values[row], torch.full((len(row),), 0.5)),
        torch.zeros_like(row),
    )
    got = sampling.score(
        there(logits, device), there(rows, device), None, chosen.to(device), num_top=count
    )
    assert torch.equal(
        got.top_ids.cpu(), REFERENCE.score(logits, rows, None, chosen, num_top=count).top_ids
    )


@pytest.mark.parametrize("count", [1, 5, 9])
def test_the_best_where_most_tokens_are_masked(
    sampling: SamplingKernels, device: torch.device, count: int
) -> None:
    logits = torch.full((3, 9), -math.inf)
    logits[0, [2, 7, 4]] = torch.tensor([1.0, 1.0, 3.0])
    logits[1, 8], logits[2] = 0.0, -0.0
    logits[2, 5] = 0.0
    rows = ScaledRows(torch.tensor([2, 0, 1]), torch.tensor([0.0, 3.0, 0.0]), torch.ones(3))
    chosen = torch.tensor([5, 4, 8])
    got = sampling.score(
        there(logits, device), there(rows, device), None, chosen.to(device), num_top=count
    )
    assert torch.equal(
        got.top_ids.cpu(), REFERENCE.score(logits, rows, None, chosen, num_top=count).top_ids
    )


def test_penalties(sampling: SamplingKernels, device: torch.device) -> None:
    logits, penalties = make_logits(6, 300), make_penalties()
    ours, theirs = logits.to(device, copy=True), logits.clone()
    sampling.penalise(ours, there(penalties, device))
    REFERENCE.penalise(theirs, penalties)
    assert torch.equal(ours.cpu(), theirs) and not torch.equal(theirs, logits)


def test_logits_that_do_not_fit_are_refused(sampling: SamplingKernels) -> None:
    with pytest.raises(TypeError, match="contiguous float32"):
        sampling.argmax(torch.zeros(2, 3, dtype=torch.float64))


def test_it_is_chosen_beside_the_triton_kernels(kernels: Kernels, device: torch.device) -> None:
    assert select_sampling(kernels).name == "triton"


@pytest.mark.slow
def test_plain_rows_are_chosen_without_a_look_from_the_host(
    sampling: SamplingKernels, device: torch.device
) -> None:
    """Rows that are not finite end in some token, not in a kernel that never ends."""
    logits = make_logits(12, 65)
    logits[3:6, 5], logits[6:9, 5], logits[9:] = math.nan, math.inf, -math.inf
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.01},
    ]
    rows = [SampledRow(RowSampling(seed=i, **kinds[i % 3]), position=i) for i in range(12)]
    token_ids, max_logits = choose_plain(
        sampling,
        logits.clone().to(device),
        rows,
        lambda arrays: [torch.from_numpy(array).to(device) for array in arrays],
    )
    expected = Sampler(REFERENCE).sample(logits, rows)
    assert greedy_results((token_ids, max_logits), [1] * 12) == expected and all(
        each.token_ids for each in expected[:3]
    )
    assert ((token_ids >= 0) & (token_ids < 65)).all()
