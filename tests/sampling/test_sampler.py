"""The sampler against a naive reference written independently of it, row by row in float64, and its
promises: exact statistics, independence of company, and containment of failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from quire.common.seeds import derive_seed
from quire.core.plan import RowSampling, WorkResult
from quire.kernels.reference.sampling import ReferenceSampling
from quire.sampling import ProcessorTable, SampledRow, Sampler

Floats = NDArray[np.float64]
INF = math.inf


def make_row(
    position: int = 7, *, prompt: Any = (), output: Any = (), samples: int = 1, **sampling: Any
) -> SampledRow:
    return SampledRow(RowSampling(**sampling), position, prompt, output, num_samples=samples)


def make_sampler(processors: ProcessorTable | None = None) -> Sampler:
    return Sampler(ReferenceSampling(), processors)


def logits_of(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def random_logits(num_rows: int, vocab_size: int = 50, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def only(results: list[WorkResult]) -> WorkResult:
    assert len(results) == 1 and results[0].error is None
    return results[0]


# ---- a naive sampler: one row, float64, full sorts ----


def naive_edit(logits: Floats, row: SampledRow) -> Floats:
    sampling, prompt, output = row.sampling, list(row.prompt_token_ids), list(row.output_token_ids)
    edited = logits.copy()
    if sampling.allowed_token_ids is not None:
        edited = np.array(
            [v if i in sampling.allowed_token_ids else -INF for i, v in enumerate(edited)]
        )
    for word in sampling.bad_words:
        before = list(word[:-1])
        if not before or output[-len(before) :] == before:
            edited[word[-1]] = -INF
    if len(output) < sampling.min_tokens:
        edited[list(sampling.stop_token_ids)] = -INF
    for token_id, bias in sampling.logit_bias:
        edited[token_id] += bias
    for token_id in set(prompt + output):
        penalty = sampling.repetition_penalty
        edited[token_id] = (
            edited[token_id] / penalty if edited[token_id] > 0 else edited[token_id] * penalty
        )
    for token_id in set(output):
        edited[token_id] -= (
            sampling.frequency_penalty * output.count(token_id) + sampling.presence_penalty
        )
    return edited


def naive_probabilities(edited: Floats, sampling: RowSampling) -> Floats:
    scaled = edited / sampling.temperature
    order = sorted(range(len(edited)), key=lambda i: (-edited[i], i))
    probs = np.exp(scaled - scaled.max())
    kept = [i for i in order if probs[i] > 0 and probs[i] >= sampling.min_p]
    kept = kept[: sampling.top_k] if sampling.top_k else kept
    total, cumulative, nucleus = probs[kept].sum(), 0.0, []
    for i in kept:
        nucleus.append(i)
        cumulative += probs[i]
        if cumulative >= sampling.top_p * total:
            break
    result: Floats = np.zeros(len(probs))
    result[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return result


def naive_noise(seed: int, position: int, vocab_size: int) -> Floats:
    """Philox with Python's integers, and Gumbel in float64."""
    noise = []
    for token in range(vocab_size):
        counter, key = (
            [token >> 2, position & 0xFFFFFFFF, position >> 32, 0],
            [seed & 0xFFFFFFFF, seed >> 32],
        )
        for _ in range(10):
            a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
            mask = 0xFFFFFFFF
            counter = [
                (b >> 32) ^ counter[1] ^ key[0],
                b & mask,
                (a >> 32) ^ counter[3] ^ key[1],
                a & mask,
            ]
            key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
        noise.append(-math.log(-math.log((counter[token & 3] + 0.5) / 2**32)))
    return np.array(noise)


def naive_sample(logits: Floats, row: SampledRow, draw: int = 0) -> int:
    edited = naive_edit(logits, row)
    if row.sampling.temperature == 0:
        return int(edited.argmax())
    probs = naive_probabilities(edited, row.sampling)
    noise = naive_noise(derive_seed(row.sampling.seed, draw), row.position, len(logits))
    with np.errstate(divide="ignore"):
        return int((np.log(probs) + noise).argmax())


def naive_logprobs(logits: Floats) -> Floats:
    return np.asarray(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


# ---- features ----

VOCAB = 40
token_ids = st.integers(0, VOCAB - 1)
samplings = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 3, 20, 100]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(token_ids, max_size=3).map(tuple),
        "logit_bias": st.dictionaries(
            token_ids, st.sampled_from([-3.0, 1.25, 4.0]), max_size=3
        ).map(lambda biases: tuple(biases.items())),
        "allowed_token_ids": st.none() | st.lists(token_ids, min_size=12, unique=True).map(tuple),
        "bad_words": st.lists(
            st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3
        ).map(tuple),
    }
)
sampled_rows = st.builds(
    lambda sampling, position, prompt, output, samples: make_row(
        position,
        prompt=prompt,
        output=np.array(output, dtype=np.int32),
        samples=samples,
        **sampling,
    ),
    samplings,
    st.integers(0, 2**40),
    st.lists(token_ids, max_size=8),
    st.lists(token_ids, max_size=6),
    st.integers(1, 3),
)


@given(rows=st.lists(sampled_rows, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_any_parameters_agree_with_the_naive_sampler(rows: list[SampledRow], seed: int) -> None:
    logits = random_logits(len(rows), VOCAB, seed)
    for row, values, result in zip(rows, logits, make_sampler().sample(logits, rows), strict=True):
        reference = values.double().numpy()
        if not np.isfinite(naive_edit(reference, row).max()):
            assert result.error is not None and "no token is left" in result.error
            continue
        assert result.token_ids == tuple(
            naive_sample(reference, row, draw) for draw in range(row.num_samples)
        )


@given(rows=st.lists(sampled_rows, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_company(rows: list[SampledRow], seed: int) -> None:
    rows = [row._replace(sampling=row.sampling._replace(num_logprobs=3)) for row in rows]
    logits = random_logits(len(rows), VOCAB, seed)
    together = make_sampler().sample(logits, rows)
    alone = [
        make_sampler().sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)
    ]
    assert together == alone


def test_one_feature_at_a_time_changes_what_it_should() -> None:
    logits = logits_of([1.0, 2.0, 3.0, 4.0])
    greedy: dict[str, Any] = {"temperature": 0.0}
    rows = {
        3: make_row(**greedy),
        2: make_row(**greedy, allowed_token_ids=(0, 2)),
        1: make_row(**greedy, logit_bias=((1, 10.0),)),
        0: make_row(
            **greedy, bad_words=((3,), (5, 2)), min_tokens=3, stop_token_ids=(1,), output=[4, 5]
        ),
    }
    sampler = make_sampler()
    for expected, row in rows.items():
        wide = torch.cat([logits, torch.full((1, 4), -9.0)], dim=1)
        assert only(sampler.sample(wide, [row])).token_ids == (expected,)


def test_min_tokens_binds_until_enough_were_generated() -> None:
    logits = logits_of([0.0, 5.0, 1.0])
    short = make_row(temperature=0.0, min_tokens=2, stop_token_ids=(1,), output=[0])
    enough = make_row(temperature=0.0, min_tokens=2, stop_token_ids=(1,), output=[0, 0])
    assert [
        result.token_ids for result in make_sampler().sample(logits.repeat(2, 1), [short, enough])
    ] == [(2,), (1,)]


def test_ties_go_to_the_smallest_id() -> None:
    logits = logits_of([1.0, 3.0, 3.0, 3.0])
    assert only(make_sampler().sample(logits, [make_row(temperature=0.0)])).token_ids == (1,)
    drawn = make_sampler().sample(
        logits.repeat(200, 1), [make_row(i, top_k=2, seed=1) for i in range(200)]
    )
    assert {result.token_ids[0] for result in drawn} == {1, 2}


def test_logits_are_never_written() -> None:
    logits = random_logits(2)
    before = logits.clone()
    make_sampler().sample(
        logits, [make_row(allowed_token_ids=(1, 2)), make_row(repetition_penalty=2.0, prompt=[1])]
    )
    assert torch.equal(logits, before)


def test_placeholder_ids_in_a_prompt_are_not_penalised() -> None:
    row = make_row(
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        prompt=[-1, 50, 0],
        output=[99, 0],
    )
    assert only(make_sampler().sample(logits_of([5.0, 4.0]), [row])).token_ids == (1,)


def test_more_samples_are_those_of_derived_seeds() -> None:
    logits = random_logits(1)
    three = only(make_sampler().sample(logits, [make_row(seed=11, samples=3)])).token_ids
    alone = [
        only(make_sampler().sample(logits, [make_row(seed=derive_seed(11, i))])).token_ids[0]
        for i in range(3)
    ]
    assert three == tuple(alone)
    assert only(make_sampler().sample(logits, [make_row(samples=0)])) == WorkResult()


def test_no_rows() -> None:
    assert make_sampler().sample(torch.empty(0, 9), []) == []


# ---- statistics ----

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.5, "prompt": [0, 1, 2], "presence_penalty": 0.5, "output": [3]},
]


@pytest.mark.parametrize("wish", FILTERS, ids=[",".join(wish) or "plain" for wish in FILTERS])
def test_frequencies_follow_the_probabilities(wish: dict[str, Any]) -> None:
    """Chi-square at the 1e-4 level over the derived seeds of one fixed seed,
    which must be as good as independent."""
    num_draws, logits = 5000, random_logits(1, 24, seed=5) / 2
    row = make_row(seed=77, samples=num_draws, **wish)
    expected = (
        naive_probabilities(naive_edit(logits[0].double().numpy(), row), row.sampling) * num_draws
    )
    counts = np.bincount(only(make_sampler().sample(logits, [row])).token_ids, minlength=24)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    degrees = int(common.sum()) - 1
    # above the chi-square quantile at 1 - 1e-4
    assert statistic < degrees + 3.72 * math.sqrt(2 * degrees) + 9.2


def test_seeds_and_positions_are_independent() -> None:
    """Two seeds at the same positions, and one seed at neighbouring ones,
    agree no more often than chance has it."""
    logits, n = torch.zeros(1, 8), 2000
    streams = [
        [
            r.token_ids[0]
            for r in make_sampler().sample(
                logits.expand(n, -1), [make_row(p, seed=s) for p in range(n)]
            )
        ]
        for s in (1, 2)
    ]
    for first, second in ((streams[0], streams[1]), (streams[0][1:], streams[0][:-1])):
        agreement = sum(a == b for a, b in zip(first, second, strict=True))
        assert abs(agreement - n / 8) < 5 * math.sqrt(n * 7 / 64)


# ---- log-probabilities ----


def test_raw_logprobs_describe_the_model() -> None:
    logits = random_logits(1)
    row = make_row(
        seed=3,
        temperature=0.7,
        top_k=4,
        num_logprobs=5,
        logit_bias=((2, 3.0),),
        logprob_token_ids=(49, 0),
    )
    report = only(make_sampler().sample(logits, [row])).logprobs[0]
    expected = naive_logprobs(logits[0].double().numpy())
    best = np.argsort(-expected, kind="stable")
    assert report.top_ids[:5] == tuple(best[:5])
    assert set(report.top_ids) == set(best[:5]) | {49, 0}
    assert report.top_logprobs == pytest.approx(expected[list(report.top_ids)], abs=2e-6)
    assert report.logprob == pytest.approx(expected[report.token_id], abs=2e-6)
    assert report.rank == 1 + (expected > expected[report.token_id]).sum()


def test_processed_logprobs_describe_what_was_drawn_from() -> None:
    logits = random_logits(1)
    wish: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 4,
        "logit_bias": ((2, 3.0),),
        "num_logprobs": 6,
    }
    row = make_row(seed=3, logprobs_mode="processed_logprobs", **wish)
    report = only(make_sampler().sample(logits, [row])).logprobs[0]
    probs = naive_probabilities(naive_edit(logits[0].double().numpy(), row), row.sampling)
    assert np.exp(report.top_logprobs) == pytest.approx(probs[list(report.top_ids)], abs=1e-6)
    assert report.top_logprobs[4:] == (-INF, -INF)
    assert math.exp(report.logprob) == pytest.approx(probs[report.token_id], abs=1e-6)


@pytest.mark.parametrize(("mode", "scale"), [("raw_logits", 1.0), ("processed_logits", 2.0)])
def test_logits_modes(mode: str, scale: float) -> None:
    row = make_row(temperature=0.5, top_k=1, num_logprobs=2, logprobs_mode=mode)
    report = only(make_sampler().sample(logits_of([1.0, 3.0, 2.0]), [row])).logprobs[0]
    assert (report.token_id, report.logprob, report.top_ids) == (1, 3.0 * scale, (1, 2))
    assert report.top_logprobs == (3.0 * scale, 2.0 if scale == 1.0 else -INF)


def test_the_whole_vocabulary_and_none_of_it() -> None:
    logits = random_logits(1)
    full, bare = (
        only(make_sampler().sample(logits, [make_row(temperature=0.0, num_logprobs=n)])).logprobs[0]
        for n in (-1, 0)
    )
    assert sorted(full.top_ids) == list(range(50))
    assert math.fsum(math.exp(logprob) for logprob in full.top_logprobs) == pytest.approx(
        1.0, abs=1e-6
    )
    assert (bare.top_ids, bare.rank, bare.logprob) == ((), 1, full.top_logprobs[0])


def test_rank_counts_strictly_better_tokens() -> None:
    logits = logits_of([2.0, 1.0, 1.0, 0.0])
    report = only(
        make_sampler().sample(logits, [make_row(allowed_token_ids=(2,), num_logprobs=3)])
    ).logprobs[0]
    assert (report.token_id, report.rank, report.top_ids) == (2, 2, (0, 1, 2))


def test_every_sample_has_its_own_report() -> None:
    result = only(make_sampler().sample(random_logits(1), [make_row(samples=4, num_logprobs=1)]))
    assert [report.token_id for report in result.logprobs] == list(result.token_ids)


def test_beam_candidates_are_the_best_tokens_that_can_be_sampled() -> None:
    logits = random_logits(1)
    row = make_row(temperature=0.0, allowed_token_ids=(1, 5, 9))._replace(num_candidates=8)
    result = only(make_sampler().sample(logits, [row]))
    expected = naive_logprobs(naive_edit(logits[0].double().numpy(), row))
    assert result.token_ids == () and len(result.logprobs) == 1
    report = result.logprobs[0]
    assert report.top_ids == tuple(sorted((1, 5, 9), key=lambda i: -expected[i]))
    assert report.top_logprobs == pytest.approx(expected[list(report.top_ids)], abs=1e-6)


def test_prompt_logprobs() -> None:
    logits, targets = random_logits(300), [i % 50 for i in range(300)]
    sampling = RowSampling(num_prompt_logprobs=2)
    reports = make_sampler().prompt_logprobs(logits, targets, sampling)
    assert len(reports) == 300
    for values, target, report in zip(logits, targets, reports, strict=True):
        expected = naive_logprobs(values.double().numpy())
        assert report.token_id == target and report.rank == 1 + (expected > expected[target]).sum()
        assert report.logprob == pytest.approx(expected[target], abs=2e-6)
        assert report.top_ids == tuple(np.argsort(-expected, kind="stable")[:2])
    assert make_sampler().prompt_logprobs(logits[7:9], targets[7:9], sampling) == reports[7:9]


# ---- containment ----


def raising(output: list[int], logits: Tensor) -> Tensor:
    raise ValueError("no such token")


def forbid_all(output: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, -INF)


def poison(output: list[int], logits: Tensor) -> Tensor:
    logits[0] = math.nan
    return logits


def wrong_shape(output: list[int], logits: Tensor) -> Tensor:
    return logits[:3]


def forgetful(output: list[int], logits: Tensor) -> None:
    return None


@pytest.mark.parametrize(
    ("processor", "complaint"),
    [
        (raising, "raised ValueError"),
        (forbid_all, "no token is left"),
        (poison, "NaN"),
        (wrong_shape, "shape"),
        (forgetful, "NoneType"),
    ],
)
def test_a_bad_processor_fails_its_row_alone(processor: Callable[..., Any], complaint: str) -> None:
    table = ProcessorTable()
    bad = make_row(processors=(table.register(processor),))
    logits = random_logits(3)
    rows = [
        make_row(seed=1),
        bad,
        make_row(seed=2, repetition_penalty=1.2, prompt=[1, 2], num_logprobs=2),
    ]
    results = make_sampler(table).sample(logits, rows)
    assert results[1].error is not None and complaint in results[1].error
    assert results[1].token_ids == () and results[1].logprobs == ()
    assert [results[0], results[2]] == make_sampler().sample(logits[[0, 2]], [rows[0], rows[2]])


@pytest.mark.parametrize("poisoned", [[math.nan, 1.0], [1.0, INF], [-INF, -INF], [INF, math.nan]])
@pytest.mark.parametrize(
    "wish", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"logit_bias": ((0, 1.0),)}]
)
def test_bad_logits_fail_their_row_alone(poisoned: list[float], wish: dict[str, Any]) -> None:
    good = make_row(num_logprobs=1, **wish)
    logits = logits_of([0.5, 0.25], poisoned, [1.0, -INF])
    results = make_sampler().sample(logits, [good] * 3)
    assert results[1].error is not None and "not finite" in results[1].error
    assert [results[0], results[2]] == make_sampler().sample(logits[[0, 2]], [good] * 2)
    assert results[2].token_ids == (0,)


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids", "bad_words", "logit_bias"])
def test_ids_outside_the_vocabulary_fail_their_row_alone(name: str) -> None:
    value: Any = {"bad_words": ((1, 50),), "logit_bias": ((50, 1.0),)}.get(name, (50,))
    rows = [make_row(temperature=0.0), make_row(min_tokens=1, **{name: value})]
    results = make_sampler().sample(random_logits(2), rows)
    assert results[0].error is None and len(results[0].token_ids) == 1
    assert (
        results[1].error is not None
        and "token id 50" in results[1].error
        and name in results[1].error
    )


def test_masks_that_leave_nothing() -> None:
    row = make_row(allowed_token_ids=(4,), bad_words=((4,),))
    result = make_sampler().sample(random_logits(1), [row])[0]
    assert result.error is not None and "no token is left" in result.error
