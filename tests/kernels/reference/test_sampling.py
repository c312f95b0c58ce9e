"""The reference sampling kernels: published Philox vectors, accuracy of the noise and the weights,
and naive searches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.reference.sampling import (
    ReferenceSampling,
    best_first,
    gumbel,
    philox,
    random_words,
    weights,
)
from quire.kernels.sampling import WEIGHT_ONE, Filters, Keys, ScaledRows, Thresholds

# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    k0, k1 = (torch.tensor(word) for word in key)
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == answer


def test_words_are_laid_out_by_token_position_and_seed() -> None:
    seed, position = -2, (5 << 32) + 9  # the seed 2**64 - 2
    words = random_words(Keys(torch.tensor([seed]), torch.tensor([position])), 11)[0].tolist()
    for token in range(11):
        counter = tuple(torch.tensor(word) for word in (token >> 2, 9, 5, 0))
        expected = philox(counter, (torch.tensor(0xFFFFFFFE), torch.tensor(0xFFFFFFFF)))[token & 3]  # type: ignore[arg-type]
        assert words[token] == int(expected)


def test_noise_is_accurate_at_both_tails() -> None:
    ends = torch.arange(2000)
    words = torch.cat(
        [ends, (1 << 31) - 1000 + ends, (1 << 32) - 1 - ends, torch.randint(0, 1 << 32, (200_000,))]
    )
    low, high = (words.double() + 0.5) / 2**32, ((1 << 32) - 1 - words.double() + 0.5) / 2**32
    exact = -torch.log(torch.where(words < 1 << 31, -torch.log(low), -torch.log1p(-high)))
    noise = gumbel(words)
    assert noise.dtype is torch.float32
    assert torch.all((noise - exact).abs() <= 2e-7 * exact.abs().clamp(min=1))
    assert (float(noise.min()), float(noise.max())) == pytest.approx(
        (-math.log(33 * math.log(2)), 33 * math.log(2))
    )


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    n = 1 << 18
    noise = gumbel(random_words(Keys(torch.tensor([3]), torch.tensor([4])), n)).double()
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=5 * math.sqrt(math.pi**2 / 6 / n))
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_weights_are_accurate_integers() -> None:
    distance = torch.cat(
        [torch.linspace(-40, 0, 100_001), torch.tensor([-torch.inf, -1e30, -80.5])]
    )
    exact = distance.double().exp() * WEIGHT_ONE
    assert weights(distance).dtype is torch.int64
    assert torch.all((weights(distance) - exact).abs() <= 1 + 2e-7 * exact)
    assert int(weights(torch.zeros(1))) == WEIGHT_ONE
    assert int(weights(torch.tensor([-torch.inf]))) == 0


# few, so that there are ties
LEVELS = st.sampled_from([-torch.inf, -50.0, -2.0, -0.5, 0.0, 0.25, 1.0, 1.5, 3.0])
some_logits = st.lists(LEVELS, min_size=1, max_size=40).filter(
    lambda values: max(values) > -torch.inf
)


def one_row(values: list[float], scale: float = 1.0) -> tuple[Tensor, ScaledRows]:
    logits = torch.tensor([values])
    return logits, ScaledRows(torch.tensor([0]), logits.max(dim=1).values, torch.tensor([scale]))


@given(values=some_logits, data=st.data())
def test_best_first_order(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert best_first(torch.tensor(values), count).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(
    values=some_logits,
    top_k=st.integers(1, 50),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.25, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-3, 0.2, 1.0]),
)
def test_thresholds_keep_what_a_full_sort_keeps(
    values: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    logits, rows = one_row(values, 0.7)
    floor = math.log(min_p) if min_p else -math.inf
    filters = Filters(
        torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64), torch.tensor([floor])
    )
    thresholds = ReferenceSampling().thresholds(logits, rows, filters)
    value, last = float(thresholds.value), int(thresholds.token_id)
    kept = [
        i
        for i, v in enumerate(values)
        if v > -math.inf and (v > value or (v == value and i <= last))
    ]

    order = sorted(
        (i for i, v in enumerate(values) if v > -math.inf), key=lambda i: (-values[i], i)
    )
    distance = (logits[0] - logits.max()) * 0.7
    order = [i for i in order if float(distance[i]) >= float(torch.tensor(floor))][:top_k]
    weight = {i: int(weights(distance[i : i + 1])) for i in order}
    target = math.ceil(top_p * sum(weight.values())) if top_p < 1 else math.inf
    expected: list[int] = []
    for i in order:
        expected.append(i)
        if sum(weight[j] for j in expected) >= target:
            break
    assert kept == sorted(expected)


def test_argmax_shows_what_is_wrong_with_a_row() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, nan, inf], [-inf, inf, 0.0], [-inf] * 3])
    token_ids, values = ReferenceSampling().argmax(logits)
    assert (int(token_ids[0]), float(values[0])) == (1, 3.0)
    assert math.isnan(values[1]) and values[2] == inf and values[3] == -inf


def test_scores() -> None:
    logits, rows = one_row([1.0, 2.0, 1.0, -math.inf, 0.0])
    scores = ReferenceSampling().score(logits, rows, None, torch.tensor([2]), num_top=4)
    exact = sum(math.exp(v - 2.0) for v in (1.0, 2.0, 1.0, 0.0))
    assert int(scores.total) / WEIGHT_ONE == pytest.approx(exact, rel=1e-7)
    assert (int(scores.rank), scores.top_ids.tolist()) == (2, [[1, 0, 2, 4]])
    # keeps ids 1 and 0; id 2 comes after the last one kept
    threshold = Thresholds(torch.tensor([1.0]), torch.tensor([1]))
    kept = ReferenceSampling().score(logits, rows, threshold, torch.tensor([0]))
    assert int(kept.total) / WEIGHT_ONE == pytest.approx(1 + math.exp(-1.0), rel=1e-7)
