"""The oracle's beam search against exhaustive enumeration,
where beams are wide enough to lose nothing."""

from __future__ import annotations

from itertools import product

import numpy as np

from quire.core.plan import RowSampling
from quire.core.request import FinishReason
from quire.core.request_spec import BeamSettings, RequestSpec
from quire.sim.oracle import Oracle


def _logprob(oracle: Oracle, tokens: tuple[int, ...], token_id: int) -> float:
    logits = oracle.logits(tokens)
    return float(logits[token_id] - np.log(np.exp(logits).sum()))


def test_a_wide_enough_search_finds_the_best_of_all_sequences() -> None:
    oracle = Oracle(7, 3)
    beam = BeamSettings(9, length_penalty=0.0)
    spec = RequestSpec(prompt_token_ids=(1, 2), max_tokens=3, beam=beam)
    best = sorted(
        (-sum(_logprob(oracle, (1, 2, *tokens[:i]), tokens[i]) for i in range(3)), list(tokens))
        for tokens in product(range(3), repeat=3)
    )
    answers = oracle.search(spec)
    assert [answer.token_ids for answer in answers] == [tokens for _, tokens in best[:9]]


def test_greedy_is_the_most_likely_token_each_time() -> None:
    oracle = Oracle(7, 5)
    spec = RequestSpec(prompt_token_ids=(1, 2), max_tokens=4, sampling=RowSampling(temperature=0.0))
    answer = oracle.sample(spec, 0, 4)
    tokens = [1, 2]
    for token_id in answer.token_ids:
        assert token_id == int(np.argmax(oracle.logits(tuple(tokens))))
        tokens.append(token_id)
    assert answer.finish_reason is FinishReason.LENGTH


def test_sequences_of_one_request_differ_and_seeds_matter() -> None:
    oracle = Oracle(7, 12)
    spec = RequestSpec(prompt_token_ids=(1, 2), max_tokens=12, sampling=RowSampling(seed=1))
    answers = {tuple(oracle.sample(spec, index, 12).token_ids) for index in range(4)}
    assert len(answers) == 4


def test_prompt_scores_begin_with_none() -> None:
    oracle = Oracle(7, 5)
    spec = RequestSpec(prompt_token_ids=(1, 2, 3), sampling=RowSampling(num_prompt_logprobs=2))
    scores = oracle.score_prompt(spec)
    assert scores[0] is None and len(scores) == 3
    assert scores[2] is not None and scores[2].token_id == 3 and len(scores[2].top_ids) == 2
