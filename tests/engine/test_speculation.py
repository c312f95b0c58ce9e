"""Guessing changes no bit: tokens, log-probabilities, texts, finish reasons are those of an engine
that guesses nothing, whoever guesses, however well, and whatever else happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import run_all
from guesses import (
    AnyTokens,
    KnownAnswers,
    by_head,
    by_model,
    draft_all,
    guess_with,
    level_steps,
)
from optional_packages import HAS_GRAMMARS
from relay import Relay

from quire.config.engine import EngineConfig
from quire.core.drafts import FORCED
from quire.core.params import SamplingParams, ThinkTags
from quire.core.speculation.lookup import LookupDrafter, OutputMemory, RecallDrafter
from quire.core.speculation.mixture import BestOf
from quire.core.speculation.speculator import Speculator
from quire.core.speculation.standing import StandingOrders
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.requests import RequestBuilder
from quire.engine.loop.engine import Engine
from quire.engine.process.journal import Journal

MakeEngine = Callable[..., Engine]
Answers = dict[str, tuple[Any, ...]]
VOCAB_SIZE = 256


def _prompt(seed: int, length: int, *, repeats: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)] * repeats


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
LONG_KEYS = {
    "type": "object",
    "properties": {"the first temperature": {"type": "integer"}, "is it": {"type": "boolean"}},
    "required": ["the first temperature", "is it"],
}
LOOP = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2}
MARKS = ThinkTags("<think>", "</think>", is_open=True)
_TEMPERATURES = (0.0, 0.7, 1.0)

REQUESTS: Mapping[str, tuple[list[int], dict[str, Any]]] = {
    **{f"t={t}": (_prompt(1, 13, repeats=3), {"temperature": t}) for t in _TEMPERATURES},
    **{
        f"penalties t={t}": (
            _prompt(2, 23),
            {
                "temperature": t, "presence_penalty": 0.7, "frequency_penalty": 0.4,
                "repetition_penalty": 1.3,
            },
        )
        for t in _TEMPERATURES
    },
    "filters": (_prompt(3, 17), {"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
    "few tokens": (_prompt(4, 12), {"temperature": 3.0, "allowed_token_ids": [5, 6, 7]}),
    "bad words": (
        _prompt(4, 12),
        {"temperature": 3.0, "allowed_token_ids": [67, 68, 69], "bad_words": ["ab", "cca"]},
    ),
    "biased": (
        _prompt(5, 9),
        {"logit_bias": {5: 4.0, 6: -100.0}, "min_tokens": 6, "stop_token_ids": [5, 9]},
    ),
    "loop": (
        _prompt(6, 12),
        {"temperature": 3.0, "allowed_token_ids": [5, 6], "repetition_detection": LOOP},
    ),
    "stop token": (
        _prompt(7, 10), {"allowed_token_ids": [65, 66, 67, 68], "stop_token_ids": [68]},
    ),
    "stop string": (_prompt(8, 10), {"allowed_token_ids": [67, 68, 69], "stop": ["bcb", "cab"]}),
    "stop kept": (
        _prompt(9, 10),
        {
            "allowed_token_ids": [67, 68, 69], "stop": ["ab"], "min_tokens": 4,
            "include_stop_str_in_output": True,
        },
    ),
    "three": (_prompt(10, 14), {"n": 3, "allowed_token_ids": [5, 6, 7]}),
    "long": (_prompt(11, 60), {"temperature": 0.7}),
    "scored": (_prompt(12, 20), {"prompt_logprobs": 2, "logprobs_mode": "raw_logprobs"}),
    "plain": (_prompt(13, 20, repeats=2), {"logprobs": None}),
    "plain greedy": (_prompt(14, 20, repeats=2), {"logprobs": None, "temperature": 0.0}),
    "thinking": (_prompt(15, 26), {"thinking_token_budget": 5, "thinking_marks": MARKS}),
    "json": (_prompt(16, 21), {"ignore_eos": False, "structured_outputs": {"json": SCHEMA}}),
    "long keys": (
        _prompt(18, 11),
        {"temperature": 0.7, "ignore_eos": False, "structured_outputs": {"json": LONG_KEYS}},
    ),
    "regex": (
        _prompt(17, 5),
        {"temperature": 0.0, "ignore_eos": False, "structured_outputs": {"regex": "[ab]{9}-[0-9]*"}},
    ),
}  # fmt: skip
if not HAS_GRAMMARS:
    REQUESTS = {
        name: each for name, each in REQUESTS.items() if "structured_outputs" not in each[1]
    }
COMMON = {"max_tokens": 24, "logprobs": 3, "ignore_eos": True, "seed": 7}
ENGINE = {"tokenizer": "quire-storyteller"}  # its first 256 tokens: bytes, among others


def _submit(engine: Engine, suffix: str = "") -> None:
    for name, (prompt, options) in REQUESTS.items():
        params = SamplingParams(**{**COMMON, **options})
        engine.add_request(name + suffix, {"prompt_token_ids": prompt}, params)


def _answer(output: RequestOutput) -> tuple[Any, ...]:
    sequences = [
        (
            each.text, each.token_ids, each.logprobs, each.cumulative_logprob, each.finish_reason,
            each.stop_reason,
        )
        for each in output.outputs
    ]  # fmt: skip
    return (*sequences, output.prompt_logprobs, output.error)


def _answers(engine: Engine, after_step: Callable[[], None] = lambda: None) -> Answers:
    _submit(engine)
    return {name: _answer(output) for name, output in run_all(engine, after_step).items()}


_PLAIN: dict[str, Answers] = {}


@pytest.fixture
def plain(make_engine: MakeEngine) -> Answers:
    """What an engine answers that guesses nothing."""
    if not _PLAIN:
        engine = make_engine(**ENGINE)
        engine.scheduler.look_ahead = None
        _PLAIN["all"] = _answers(engine)
    return _PLAIN["all"]


def _known(plain: Answers) -> dict[str, list[int]]:
    names = {
        f"{name}#{index}" if index else name: sequence[1]
        for name, answer in plain.items()
        for index, sequence in enumerate(answer[:-2])
    }
    # What the texts cut off is not known; what comes after the end must not matter.
    return {name: [*tokens, *[5] * 8] for name, tokens in names.items()}


GUESSERS: dict[str, Callable[[Answers], Speculator]] = {
    "ngram": lambda plain: Speculator(LookupDrafter((1, 2, 3), most=3), 5),
    "suffix": lambda plain: Speculator(LookupDrafter(memory=OutputMemory()), 7),
    "any tokens": lambda plain: Speculator(AnyTokens(VOCAB_SIZE), 4),
    "always right": lambda plain: Speculator(KnownAnswers(_known(plain), vocab_size=VOCAB_SIZE), 8),
    "often right": lambda plain: Speculator(
        KnownAnswers(_known(plain), chance=0.7, vocab_size=VOCAB_SIZE), 3
    ),
    "auto": lambda plain: Speculator(
        BestOf([LookupDrafter(), RecallDrafter(OutputMemory()), AnyTokens(VOCAB_SIZE)]), 7
    ),
    "forced and suffix": lambda plain: Speculator(
        LookupDrafter(memory=OutputMemory()), 12, forced=StandingOrders(FORCED, 12)
    ),
}


GUESSING = [*GUESSERS, "a model", "auto and a model", "eagle", "eagle3"]
COSTLY = ("auto and a model", "eagle")
"""Whose parts others have as well: a model of "a model", a head of "eagle3"."""
FEWER = [pytest.param(name, marks=pytest.mark.slow if name in COSTLY else ()) for name in GUESSING]


@pytest.fixture(params=GUESSING)
def make_guessing(
    request: pytest.FixtureRequest, make_engine: MakeEngine, draft_config: Path, plain: Answers
) -> MakeEngine:
    """Builds engines that guess."""
    if request.param not in GUESSERS:
        method, by = str(request.param), by_model(draft_config)
        if method.startswith("eagle"):
            by = by_head(method, request.getfixturevalue(f"{method}_config"))
        elif method.startswith("auto"):
            by["speculative_config"]["method"] = "auto"
        return lambda **options: draft_all(make_engine(**ENGINE, **by, **options))
    return lambda **options: guess_with(
        make_engine(**ENGINE, **options), GUESSERS[request.param](plain)
    )


def _num_guessed(engine: Engine) -> int:
    return engine.scheduler.stats.num_run_tokens


def test_the_table_has_every_end(plain: Answers) -> None:
    ends = {name: (answer[0][4], answer[0][5]) for name, answer in plain.items()}
    assert ends["t=0.7"] == ("length", None)
    assert ends["stop token"] == ("stop", 68)
    assert ends["stop string"][0] == ends["stop kept"][0] == "stop"
    assert ends["loop"] == ("repetition", "repetition_detected")
    assert all(answer[-1] is None for answer in plain.values())


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "small steps": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "little memory": {"num_blocks": 9, "max_num_seqs": 6, "max_model_len": 128},
    "overlapped": {"overlap": "on"},
    "blocks of 4, no cache": {"block_size": 4, "enable_prefix_caching": False},
    "unchunked": {"enable_chunked_prefill": False},
}
_EVERYWHERE = {"suffix", "often right", "eagle3"}
"""A drafter of each kind: the fast suite holds these against all circumstances, and all drafters
against those that cut steps and drafts short."""


@pytest.mark.slow_combinations
@pytest.mark.parametrize(
    ("make_guessing", "circumstances"),
    [
        pytest.param(name, each, marks=() if is_fast else pytest.mark.slow)
        for name in GUESSING
        for each in CIRCUMSTANCES
        for is_fast in [
            name in _EVERYWHERE or (name not in COSTLY and each in ("small steps", "little memory"))
        ]
    ],
    indirect=["make_guessing"],
)
def test_guesses_change_no_bit_in_other_circumstances(
    circumstances: str, make_guessing: MakeEngine, plain: Answers
) -> None:
    engine = make_guessing(**CIRCUMSTANCES[circumstances])
    assert _answers(engine) == plain
    assert _num_guessed(engine) > 20


@pytest.mark.slow_except("suffix", "often right")
@pytest.mark.parametrize("make_guessing", FEWER, indirect=True)
def test_guesses_change_no_bit_where_everyone_is_preempted_now_and_then(
    make_guessing: MakeEngine, plain: Answers
) -> None:
    engine = make_guessing()
    rng = random.Random(3)

    def preempt() -> None:
        scheduler = engine.scheduler
        for sequence in scheduler.running.copy():
            if rng.random() < 0.15:
                scheduler.planner.preempt(sequence)

    assert _answers(engine, preempt) == plain
    assert engine.scheduler.stats.num_preemptions > 8


AGAIN = (" again", " and again")


@pytest.mark.slow_except("suffix-*", "auto-*")
@pytest.mark.parametrize(
    ("make_guessing", "suffixes"),
    [
        *((name, ()) for name in COSTLY),
        *(pytest.param(name, AGAIN, marks=pytest.mark.slow) for name in COSTLY),
        *((name, AGAIN) for name in GUESSING if name not in COSTLY),
    ],
    indirect=["make_guessing"],
)
def test_guesses_change_no_bit_and_what_was_rejected_is_not_found_in_the_cache(
    make_guessing: MakeEngine, plain: Answers, suffixes: tuple[str, ...]
) -> None:
    """The second answers rest on blocks that the first ones left, the third on those of both."""
    engine = make_guessing()
    assert _answers(engine) == plain
    assert _num_guessed(engine) > 50
    for suffix in suffixes:
        _submit(engine, suffix)
        outputs = run_all(engine)
        assert {name.removesuffix(suffix): _answer(outputs[name]) for name in outputs} == plain
    assert not suffixes or engine.scheduler.blocks.num_hit_tokens > 0


@pytest.mark.slow_except("False-3", "True-0")
@pytest.mark.parametrize("replace_every", [0, 3])
@pytest.mark.parametrize("has_model", [False, True])
def test_guesses_change_no_bit_beyond_an_engine_that_is_lost(
    replace_every: int, *, has_model: bool, make_engine: MakeEngine, tiny_config: Path,
    draft_config: Path, plain: Answers,
) -> None:  # fmt: skip
    """The server's process finds stop strings, and tells a new engine how far an answer is."""

    def next_engine() -> Engine:
        if has_model:
            return draft_all(make_engine(**ENGINE, **by_model(draft_config)))
        return guess_with(make_engine(**ENGINE), GUESSERS["often right"](plain))

    options: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory": "512KiB", **ENGINE}
    prepared = prepare_model(EngineConfig(model=str(tiny_config), **options))
    requests = RequestBuilder(prepared.planned.plan, prepared.tokenizer, prepared.eos_token_ids)
    relay = Relay(requests, Journal(prepared.tokenizer), next_engine)
    for name, (prompt, given) in REQUESTS.items():
        relay.add(name, prompt, SamplingParams(**{**COMMON, **given}))
    outputs = relay.run(replace_every=replace_every)
    assert {name: _answer(each[-1]) for name, each in outputs.items()} == plain


@pytest.mark.skipif(not HAS_GRAMMARS, reason="needs llguidance")
@pytest.mark.parametrize("circumstances", ["alone", "small", "overlapped", "preempted"])
def test_forced_tokens_alone_change_no_bit(
    circumstances: str, make_engine: MakeEngine, plain: Answers
) -> None:
    options: dict[str, Any] = {}
    if circumstances == "small":
        options = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    elif circumstances == "overlapped":
        options = {"overlap": "on"}
    forced = Speculator(None, 12, forced=StandingOrders(FORCED, 12))
    engine = guess_with(make_engine(**ENGINE, **options), forced)
    rng = random.Random(4)

    def preempt() -> None:
        scheduler = engine.scheduler
        for sequence in scheduler.running.copy():
            if circumstances == "preempted" and rng.random() < 0.1:
                scheduler.planner.preempt(sequence)

    assert _answers(engine, preempt) == plain
    stats = engine.scheduler.stats
    assert sum(stats.num_right_by_place) > 12


@pytest.mark.skipif(not HAS_GRAMMARS, reason="needs llguidance")
def test_an_engine_drafts_what_is_forced_without_being_told(
    make_engine: MakeEngine, plain: Answers
) -> None:
    engine = level_steps(make_engine(**ENGINE))
    for _ in range(3):
        assert _answers(engine) == plain
    assert engine.scheduler.stats.num_run_tokens > 0
    assert make_engine(batch_invariant=False).scheduler.look_ahead is None


def test_a_guess_saves_steps(make_engine: MakeEngine, plain: Answers) -> None:
    engine = make_engine(**ENGINE)
    engine.scheduler.look_ahead = None
    assert _answers(engine) == plain
    other = guess_with(make_engine(**ENGINE), GUESSERS["always right"](plain))
    assert _answers(other) == plain
    assert other.scheduler.stats.num_steps < engine.scheduler.stats.num_steps / 3
