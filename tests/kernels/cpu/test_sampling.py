"""The native sampling kernels give the reference's bits: on every instruction set,
at 1 and 2 threads, for any batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_cases import make_filters, make_keys, make_logits, make_penalties, make_rows
from torch import Tensor

from quire.core.plan import RowSampling
from quire.kernels import cpu
from quire.kernels.reference.sampling import ReferenceSampling, gumbel, random_words
from quire.kernels.sampling import Filters, Keys, ScaledRows, Scores, Thresholds
from quire.sampling import SampledRow, Sampler

if cpu.IMPORT_ERROR is not None:
    pytest.skip("the native extension is not built", allow_module_level=True)

from quire.kernels.cpu.sampling import NativeSampling, gumbel_noise

REFERENCE, NATIVE = ReferenceSampling(), NativeSampling()
VOCABS = [1, 5, 63, 64, 65, 1000, 4099]


@pytest.fixture(params=cpu.supported_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with cpu.using(isa=request.param):
        yield request.param


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 2**40 + 3), (12345, 77)])
def test_noise(seed: int, position: int) -> None:
    signed = seed - 2**64 if seed >> 63 else seed
    expected = gumbel(random_words(Keys(torch.tensor([signed]), torch.tensor([position])), 40_003))[
        0
    ]
    assert torch.equal(gumbel_noise(seed, position, 40_003), expected)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_argmax(vocab_size: int) -> None:
    logits = make_logits(9, vocab_size)
    logits[1] = -math.inf
    logits[2, vocab_size // 2] = math.inf
    logits[3, -1] = math.nan
    logits[4, 0], logits[4, -1] = math.nan, math.inf
    (ids, values), (expected_ids, expected) = NATIVE.argmax(logits), REFERENCE.argmax(logits)
    assert torch.equal(
        values.nan_to_num(nan=123.0, posinf=1e38), expected.nan_to_num(nan=123.0, posinf=1e38)
    )
    sound = expected.isfinite()
    assert torch.equal(ids[sound], expected_ids[sound])


class Case(NamedTuple):
    """Inputs, and what the reference makes of them (worked out once for all instruction sets)."""

    logits: Tensor
    rows: ScaledRows
    filters: Filters
    keys: Keys
    thresholds: Thresholds
    drawn: Tensor
    freely_drawn: Tensor


@cache
def make_case(num_rows: int, vocab_size: int, seed: int) -> Case:
    logits = make_logits(num_rows, vocab_size, seed)
    rows = make_rows(logits, seed)
    count = len(rows.row)
    filters, keys = make_filters(count, vocab_size, seed), make_keys(count, seed)
    thresholds = REFERENCE.thresholds(logits, rows, filters)
    drawn, freely = (
        REFERENCE.draw(logits, rows, thresholds, keys),
        REFERENCE.draw(logits, rows, None, keys),
    )
    return Case(logits, rows, filters, keys, thresholds, drawn, freely)


@cache
def reference_scores(
    num_rows: int, vocab_size: int, seed: int, has_cuts: bool, num_top: int
) -> Scores:
    case = make_case(num_rows, vocab_size, seed)
    return REFERENCE.score(
        case.logits, case.rows, case.thresholds if has_cuts else None, case.drawn, num_top=num_top
    )


@pytest.mark.parametrize(
    "shape", [(12, 1), (12, 5), (12, 63), (12, 64), (12, 65), (12, 1000), (5, 4099), (1, 151_936)]
)
def test_thresholds_draws_and_scores(shape: tuple[int, int]) -> None:
    for seed in (1, 2) if shape[1] < 100_000 else (1,):
        case = make_case(*shape, seed)
        thresholds = NATIVE.thresholds(case.logits, case.rows, case.filters)
        assert torch.equal(thresholds.value, case.thresholds.value) and torch.equal(
            thresholds.token_id, case.thresholds.token_id
        )
        assert torch.equal(NATIVE.draw(case.logits, case.rows, thresholds, case.keys), case.drawn)
        assert torch.equal(NATIVE.draw(case.logits, case.rows, None, case.keys), case.freely_drawn)
        for has_cuts, num_top in itertools.product(
            (True, False), {min(n, shape[1]) for n in (0, 1, 20, 200)}
        ):
            some_cuts = case.thresholds if has_cuts else None
            scores = NATIVE.score(case.logits, case.rows, some_cuts, case.drawn, num_top=num_top)
            expected = reference_scores(*shape, seed, has_cuts, num_top)
            assert all(
                torch.equal(ours, theirs) for ours, theirs in zip(scores, expected, strict=True)
            )


def test_penalties() -> None:
    logits, penalties = make_logits(6, 300), make_penalties()
    ours, theirs = logits.clone(), logits.clone()
    for _ in range(2):  # the second time shows that nothing was left behind
        NATIVE.penalise(ours, penalties)
        REFERENCE.penalise(theirs, penalties)
    assert (
        torch.equal(ours, theirs)
        and torch.equal(ours[4], logits[4])
        and not torch.equal(ours, logits)
    )
    with pytest.raises(ValueError, match="outside"):
        NATIVE.penalise(ours[:5], penalties)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    values=st.lists(
        st.sampled_from([-math.inf, -3e38, -60.0, -1.0, 0.0, 0.5, 3.0]), min_size=1, max_size=150
    ),
    scale=st.sampled_from([1e-4, 0.5, 1.0, 1e5]),
    seed=st.integers(0, 2**31),
)
def test_odd_rows(values: list[float], scale: float, seed: int) -> None:
    values = [*values, 1.0]
    logits = torch.tensor([values])
    rows = ScaledRows(torch.tensor([0]), logits.max(dim=1).values, torch.tensor([scale]))
    filters = make_filters(1, len(values), seed)
    thresholds, expected = (
        NATIVE.thresholds(logits, rows, filters),
        REFERENCE.thresholds(logits, rows, filters),
    )
    assert torch.equal(thresholds.value, expected.value) and torch.equal(
        thresholds.token_id, expected.token_id
    )
    keys = make_keys(1, seed)
    assert torch.equal(
        NATIVE.draw(logits, rows, thresholds, keys), REFERENCE.draw(logits, rows, thresholds, keys)
    )


def test_threads_and_company_change_nothing() -> None:
    logits = make_logits(16, 5000)
    rows = [
        SampledRow(
            RowSampling(
                seed=i, temperature=(i % 4) / 2, top_k=i % 3 * 10, top_p=1 - i / 64, num_logprobs=4
            ),
            i,
        )
        for i in range(16)
    ]
    results = []
    before = cpu.num_threads()
    for num_threads in (1, 2):
        cpu.set_num_threads(num_threads)
        results.append(Sampler(NATIVE).sample(logits, rows))
    cpu.set_num_threads(before)
    alone = [Sampler(NATIVE).sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(16)]
    assert results[0] == results[1] == alone == Sampler(REFERENCE).sample(logits, rows)
    assert all(result.error is None for result in alone)


def test_wrong_tensors_are_refused() -> None:
    logits = make_logits(2, 10)
    rows, keys = make_rows(logits), make_keys(3)
    with pytest.raises(TypeError, match="float32"):
        NATIVE.argmax(logits.double())
    with pytest.raises(ValueError, match="contiguous"):
        NATIVE.argmax(logits.T)
    with pytest.raises(ValueError, match="row 7 of 2"):
        NATIVE.draw(logits, ScaledRows(torch.full((3,), 7), rows.max_logit, rows.scale), None, keys)
    with pytest.raises(ValueError, match="seed"):
        NATIVE.draw(logits, rows, None, Keys(keys.seed[:2], keys.position))
    with pytest.raises(TypeError, match="threshold value"):
        NATIVE.draw(logits, rows, Thresholds(rows.max_logit.double(), keys.seed), keys)
    with pytest.raises(IndexError, match="token id 10"):
        NATIVE.score(logits, rows, None, torch.tensor([0, 10, 0]))
    with pytest.raises(ValueError, match="num_top"):
        NATIVE.score(logits, rows, None, torch.tensor([0, 1, 0]), num_top=11)
