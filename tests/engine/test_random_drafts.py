"""Requests drawn at random, answered with and without speculation: nothing differs but time, whoever
drafts, beside requests that are aborted, in pools where sequences take each other's memory.

QUIRE_TEST_REQUESTS asks for more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guesses import AnyTokens, by_model, guess_with, model_drafts

from quire.core.params import SamplingParams
from quire.core.speculation.lookup import LookupDrafter, OutputMemory, RecallDrafter
from quire.core.speculation.methods import speculator_of
from quire.core.speculation.mixture import BestOf
from quire.core.speculation.speculator import Speculator
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine
from quire.spec.depth import DraftDepth

MakeEngine = Callable[..., Engine]
NUM_REQUESTS = int(os.environ.get("QUIRE_TEST_REQUESTS", "200"))
BATCH = 50
_POOLS: tuple[dict[str, Any], ...] = (
    {},
    {"num_blocks": 11, "max_num_seqs": 7, "max_model_len": 128},
    {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 128},
    {"overlap": "on", "max_num_batched_tokens": 32},
)
_DRAFTERS: dict[str, Callable[[], Speculator]] = {
    "any tokens": lambda: Speculator(AnyTokens(256), 6),
    "suffix": lambda: Speculator(LookupDrafter(memory=OutputMemory()), 7),
    "auto": lambda: Speculator(
        BestOf([LookupDrafter(), RecallDrafter(OutputMemory()), AnyTokens(256)]), 5
    ),
}


def _drawn(number: int) -> tuple[list[int], SamplingParams]:
    """A request: most prompts repeat themselves or share their beginning with others."""
    rng = random.Random(number)
    shared = random.Random(number % 5)
    common = [shared.randrange(3, 250) for _ in range(30)]
    own = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 12))] * rng.choice((1, 1, 3))
    prompt = [*common[: rng.choice((0, 0, 9, 17, 30))], *own]
    few = rng.sample(range(3, 250), 6)
    options: list[dict[str, Any]] = [
        {}, {}, {"logprobs": 2}, {"top_k": 9, "top_p": 0.9}, {"allowed_token_ids": few},
        {"allowed_token_ids": few, "stop_token_ids": few[:1], "min_tokens": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"n": 2, "allowed_token_ids": few},
        {"logit_bias": {str(few[0]): 6.0}, "logprobs": 0}, {"prompt_logprobs": 1},
        {"allowed_token_ids": few[:2], "bad_words": []}, {"min_p": 0.05},
    ]  # fmt: skip
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0)),
        max_tokens=rng.randrange(2, 20),
        seed=number,
        ignore_eos=rng.random() < 0.8,
        **rng.choice(options),
    )
    return prompt, params


def _answer(output: RequestOutput) -> tuple[Any, ...]:
    assert output.error is None
    each = [
        (one.token_ids, one.logprobs, one.cumulative_logprob, one.finish_reason, one.stop_reason)
        for one in output.outputs
    ]
    return (*each, output.prompt_logprobs)


def _answers(engine: Engine, numbers: range, aborts: random.Random | None) -> dict[int, Any]:
    """Answer requests that come little by little; with `aborts`, some others beside them that are
    aborted at some time."""
    found: dict[int, Any] = {}
    pending, doomed = list(numbers), list[str]()
    rng = aborts or random.Random(0)
    while pending or engine.has_work:
        for _ in range(min(len(pending), rng.choice((0, 1, 4)))):
            number = pending.pop(0)
            prompt, params = _drawn(number)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            if aborts is not None and rng.random() < 0.3:
                doomed.append(f"aborted {number}")
                engine.add_request(doomed[-1], {"prompt_token_ids": prompt}, params)
        if doomed and rng.random() < 0.3:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.finished and not output.request_id.startswith("aborted"):
                found[int(output.request_id)] = _answer(output)
    return found


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("drafter", [*_DRAFTERS, "a model", "auto and a model"])
def test_requests_drawn_at_random_have_the_answers_that_they_have_without_drafts(
    make_engine: MakeEngine, draft_config: Path, drafter: str
) -> None:
    plain = make_engine()
    plain.scheduler.look_ahead = None
    others, num_drafted = [], 0
    for options in _POOLS:
        if drafter in _DRAFTERS:
            others.append(guess_with(make_engine(**options), _DRAFTERS[drafter]()))
            continue
        by = by_model(draft_config)
        if drafter.startswith("auto"):
            by["speculative_config"]["method"] = "auto"
        engine = make_engine(**options, **by)
        model_drafts(engine).depth = DraftDepth(is_adaptive=False)
        config = engine.plan.config.speculation
        assert config is not None
        others.append(guess_with(engine, speculator_of(config, None)))
    for first in range(0, NUM_REQUESTS, BATCH):
        numbers = range(first, min(first + BATCH, NUM_REQUESTS))
        expected = _answers(plain, numbers, None)
        assert expected.keys() == set(numbers)
        engine = others[first // BATCH % len(others)]
        assert _answers(engine, numbers, random.Random(first)) == expected
    for engine in others:
        num_drafted += engine.scheduler.stats.num_run_tokens
        assert engine.scheduler.manager.pool.num_used == 0
    assert num_drafted > NUM_REQUESTS
