"""A request's answer is the same to the last bit, whoever else is there and whatever happened on
the way.

Every case answers the same requests under other circumstances and compares tokens and
log-probabilities bitwise with those of each request alone in a fresh engine, its prompt in one
piece, nothing cached.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import run_all
from guesses import by_head, draft_all
from late_device import LateDevice
from optional_packages import HAS_GRAMMARS, HAS_IMAGES
from replayed import replay_steps
from vision_models import GEMMA_PLACES, PLACEHOLDER, picture

from quire.common.kv_formats import KV_FORMATS
from quire.common.seeds import derive_seed
from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams, ThinkTags
from quire.engine.assembly.builder import build_engine
from quire.engine.front.async_llm import AsyncLLM
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import PromptDict
from quire.engine.loop.engine import Engine
from quire.kernels import cpu
from quire.worker.residence import Returnable

MakeEngine = Callable[..., Engine]
Requests = Mapping[str, tuple[list[int], dict[str, Any]]]
Answers = dict[str, tuple[Any, ...]]

DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")
SHARED_PREFIX = [random.Random(7).randrange(3, 250) for _ in range(37)]


def _prompt(seed: int, length: int, shared: int = 0) -> list[int]:
    rng = random.Random(seed)
    return SHARED_PREFIX[:shared] + [rng.randrange(3, 250) for _ in range(length - shared)]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer"},
        "of": {"$ref": "#"},
    },
    "required": ["name", "age"],
}

LOOP = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}

# Lengths around block edges, every kind of sampling, shared prefixes of whole blocks and of part of
# one.
REQUESTS: Requests = {
    "greedy-1": (_prompt(1, 1), {"temperature": 0.0}),
    "greedy-15": (_prompt(2, 15), {"temperature": 0.0}),
    "greedy-16": (_prompt(3, 16), {"temperature": 0.0}),
    "greedy-17": (_prompt(4, 17), {"temperature": 0.0}),
    "shared-33": (_prompt(5, 33, shared=20), {"temperature": 0.0}),
    "shared-40": (_prompt(6, 40, shared=37), {"seed": 11}),
    "shared-49": (_prompt(7, 49, shared=37), {"seed": 12, "top_k": 20, "top_p": 0.9}),
    "penalties": (
        _prompt(8, 23),
        {"seed": 13, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    ),
    "hot": (_prompt(9, 31), {"seed": 14, "temperature": 3.0, "min_p": 0.05}),
    "biased": (
        _prompt(10, 9),
        {"seed": 15, "logit_bias": {5: 4.0, 6: -100.0}, "min_tokens": 6, "stop_token_ids": [5, 9]},
    ),
    "json": (
        _prompt(11, 21),
        {"seed": 16, "ignore_eos": False, "structured_outputs": {"json": PERSON}},
    ),
    "regex": (
        _prompt(12, 5),
        {
            "temperature": 0.0,
            "ignore_eos": False,
            "structured_outputs": {"regex": "[a-f]{3,9}(-[0-9])*"},
        },
    ),
    "thinking": (
        _prompt(14, 26),
        {
            "seed": 18,
            "thinking_token_budget": 5,
            "thinking_marks": ThinkTags("<think>", "</think>", is_open=True),
        },
    ),
    "loop": (
        _prompt(13, 12),
        {"seed": 17, "temperature": 3.0, "allowed_token_ids": [5, 6], "repetition_detection": LOOP},
    ),
}
if not HAS_GRAMMARS:
    REQUESTS = {
        name: request
        for name, request in REQUESTS.items()
        if "structured_outputs" not in request[1]
    }
IMAGE_REQUESTS: Requests = {
    "one image": ([5, PLACEHOLDER, 9, 10], {"temperature": 0.0}),
    "same image": ([5, PLACEHOLDER, 9, 11, 12], {"seed": 21}),
    "two images": ([PLACEHOLDER, 7, PLACEHOLDER, *_prompt(16, 9)], {"seed": 22, "top_k": 40}),
    "image behind text": ([*SHARED_PREFIX, PLACEHOLDER, 3], {"temperature": 0.0}),
    **REQUESTS,
}
"""Of a model that reads images."""
IMAGES = {
    "one image": [(1, 40, 30)],
    "same image": [(1, 40, 30)],
    "two images": [(2, 28, 91), (1, 40, 30)],
    "image behind text": [(3, 60, 28)],
}
"""Seeds and sizes."""
COMMON = {"max_tokens": 18, "logprobs": 3, "prompt_logprobs": 2, "ignore_eos": True}


def _params(options: dict[str, Any], **overrides: Any) -> SamplingParams:
    return SamplingParams(**{**COMMON, **options, **overrides})


def _answer(output: RequestOutput) -> tuple[Any, ...]:
    assert output.error is None
    sequences = [
        (
            each.token_ids,
            each.logprobs,
            each.cumulative_logprob,
            each.finish_reason,
            each.stop_reason,
        )
        for each in output.outputs
    ]
    return (*sequences, output.prompt_logprobs)


def _given(name: str, prompt: list[int]) -> PromptDict:
    given: PromptDict = {"prompt_token_ids": prompt}
    if name in IMAGES:
        given["multi_modal_data"] = {"image": [picture(*each) for each in IMAGES[name]]}
    return given


def _submit(engine: Engine, requests: Requests, suffix: str = "", **overrides: Any) -> None:
    for name, (prompt, options) in requests.items():
        engine.add_request(name + suffix, _given(name, prompt), _params(options, **overrides))


def _requests(engine: Engine) -> Requests:
    return REQUESTS if engine.images is None else IMAGE_REQUESTS


def _answers(engine: Engine, requests: Requests | None = None) -> Answers:
    _submit(engine, _requests(engine) if requests is None else requests)
    return {name: _answer(output) for name, output in run_all(engine).items()}


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
SINKS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "sliding_window": 24,
    "num_hidden_layers": 4,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int8 cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "experts": {"dtype": "bfloat16", "hf_overrides": EXPERTS},
    "int4 experts": {"dtype": "bfloat16", "quantization": "int4", "hf_overrides": EXPERTS},
    "sinks, windows": {"dtype": "bfloat16", "hf_overrides": SINKS},
    "latents": {"dtype": "bfloat16", "hf_overrides": LATENT},
    "int8 latents": {
        "dtype": "float32",
        "quantization": "int8",
        "kv_cache_dtype": "int8",
        # as many bytes a token as the others' caches of int8
        "hf_overrides": LATENT | {"kv_lora_rank": 64, "qk_rope_head_dim": 12},
    },
}
"""What is computed with: options of the engine."""
# its first 256 tokens
if HAS_IMAGES and DEVICE == "cpu":
    NUMBERS["images of any size"] = {"dtype": "float32", "model": "qwen_vl_config"}
    NUMBERS["images, bfloat16"] = {"dtype": "bfloat16", "model": "llava_config"}
    NUMBERS["images seen whole"] = {"dtype": "float32", "model": "gemma3_config"}
NUMBERS = {name: {**options, "tokenizer": "quire-storyteller"} for name, options in NUMBERS.items()}


SPANS = {"images seen whole": GEMMA_PLACES}
"""Tokens that a step computes together, by column. The engine refuses steps with less room than for
two of these beside a decode of each sequence."""


def _engine(make: MakeEngine, numbers: str, **options: Any) -> Engine:
    """An engine that computes with these numbers, with steps of the least size if the given one is
    smaller."""
    span, given = SPANS.get(numbers), options.get("max_num_batched_tokens")
    if span is not None and given is not None:
        least = 2 * span + options.get("max_num_seqs", 16)
        options["max_num_batched_tokens"] = max(given, least)
    return make(**NUMBERS[numbers], **options)


_SLOW_COLUMNS = {"int4 experts", "int8 latents", "images of any size", "images, bfloat16"}
"""All of whose parts are in others."""
_COLUMNS = [
    pytest.param(name, marks=pytest.mark.slow) if name in _SLOW_COLUMNS else name
    for name in NUMBERS
]


@pytest.fixture(scope="module", params=_COLUMNS)
def numbers(request: pytest.FixtureRequest) -> str:
    options = NUMBERS[str(request.param)]
    if str(options.get("model")).endswith("_config"):
        options["model"] = str(request.getfixturevalue(options["model"]))
    return str(request.param)


_ALONE: dict[str, Answers] = {}


@pytest.fixture
def alone(numbers: str, make_engine: MakeEngine) -> Answers:
    """The reference: each request alone, in a fresh engine, cold and in one piece."""
    if numbers not in _ALONE:
        _ALONE[numbers] = {}
        has_images = "model" in NUMBERS[numbers]
        requests = IMAGE_REQUESTS if has_images else REQUESTS
        for name, request in requests.items():
            engine = _engine(make_engine, numbers, enable_prefix_caching=False)
            _ALONE[numbers] |= _answers(engine, {name: request})
    return _ALONE[numbers]


def _batched(make: MakeEngine) -> Answers:
    return _answers(make(enable_prefix_caching=False))


def _chunked(make: MakeEngine) -> Answers:
    return _answers(make(max_num_batched_tokens=7, max_num_seqs=3))


def _bounded_by_time(make: MakeEngine) -> Answers:
    """The target is too short for anything, so that chunks have the least length,
    and two prompts share a step."""
    engine = make(target_step_ms=1e-6, max_long_partial_prefills=2)
    assert engine.scheduler.pace is not None
    answers = _answers(engine)
    assert max(engine.scheduler.stats.num_steps_by_size[6:]) == 0, "no step of more than 32 tokens"
    return answers


def _one_token_at_a_time(make: MakeEngine) -> Answers:
    return _answers(make(max_num_batched_tokens=1, max_num_seqs=1))


def _unchunked(make: MakeEngine) -> Answers:
    return _answers(make(enable_chunked_prefill=False))


def _cached(make: MakeEngine) -> Answers:
    engine = make()
    _answers(engine)
    answers = _answers(engine)
    assert engine.scheduler.blocks.num_hit_tokens > 0
    return answers


def _cached_after_other_use(make: MakeEngine) -> Answers:
    """The cache was filled by requests that ended early and never asked
    for prompt log-probabilities."""
    engine = make()
    _submit(engine, _requests(engine), max_tokens=3, min_tokens=0, prompt_logprobs=None)
    for _ in range(2):
        engine.step()
    engine.abort("shared-49")
    run_all(engine)
    return _answers(engine)


def _partly_evicted(make: MakeEngine) -> Answers:
    engine = make(num_blocks=20, max_num_seqs=3)
    _answers(engine)
    _answers(engine, {"visitor": (_prompt(99, 150), {"seed": 1})})
    assert engine.scheduler.manager.num_evictions > 0
    return _answers(engine)


def _preempted(make: MakeEngine) -> Answers:
    engine = make(num_blocks=12, max_num_seqs=8)
    answers = _answers(engine)
    assert engine.scheduler.stats.num_preemptions > 0
    return answers


def _preempted_at_every_token(make: MakeEngine) -> Answers:
    """Without overlap: nobody gets anywhere who loses, after every step,
    the one in flight as well."""
    engine = make(enable_prefix_caching=False, overlap="off")
    _submit(engine, _requests(engine))
    return {
        name: _answer(output)
        for name, output in run_all(engine, after_step=engine.scheduler.preempt_all).items()
    }


def _resumed_from_cache(make: MakeEngine) -> Answers:
    engine = make(overlap="off")
    _submit(engine, _requests(engine))
    return {
        name: _answer(output)
        for name, output in run_all(engine, after_step=engine.scheduler.preempt_all).items()
    }


def _overlapped(make: MakeEngine) -> Answers:
    return _answers(make(overlap="on"))


def _overlapped_in_little_memory(make: MakeEngine) -> Answers:
    engine = make(overlap="on", num_blocks=12, max_num_seqs=8, max_num_batched_tokens=50)
    answers = _answers(engine)
    assert engine.scheduler.stats.num_preemptions > 0
    return answers


def _overlapped_and_preempted(make: MakeEngine) -> Answers:
    """Everyone loses what is in flight at every third token,
    and the token that was to come of it."""
    engine = make(overlap="on")
    _submit(engine, _requests(engine))
    num_steps = 0

    def preempt() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 3 == 0:
            engine.scheduler.preempt_all()

    return {name: _answer(output) for name, output in run_all(engine, after_step=preempt).items()}


def _replayed(make: MakeEngine) -> Answers:
    """Small steps are recorded at their first use, padded and replayed."""
    engine = make(max_num_batched_tokens=20, overlap="on")
    graphs = replay_steps(engine)
    answers = _answers(engine)
    # Steps with images are not recorded. Which sizes the others have depends on when grammars are
    # ready.
    sizes = {shape.num_tokens for shape in graphs.shapes}
    assert len(sizes) >= 3 and max(sizes) >= 4 if engine.images is None else 1 in sizes
    return answers


def _two_threads(make: MakeEngine) -> Answers:
    return _answers(make(num_threads=2))


def _blocks_of(block_size: int) -> Callable[[MakeEngine], Answers]:
    def run(make: MakeEngine) -> Answers:
        engine = make(block_size=block_size, max_num_batched_tokens=50)
        _answers(engine)
        return _answers(engine)

    return run


def _restarted(make: MakeEngine) -> Answers:
    _answers(make(), {"earlier": (_prompt(98, 30), {"seed": 3})})
    return _answers(make())


def _asleep(make: MakeEngine) -> Answers:
    """All memory goes back to the system again and again while requests run."""
    engine = make()
    residence = engine.executor.worker.residence  # type: ignore[attr-defined]
    if not isinstance(residence, Returnable):
        pytest.skip("its memory stays")
    _submit(engine, _requests(engine))
    num_steps = 0
    every = 3 if engine.images is None else 40  # an image takes steps, and begins anew

    def sleep() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps % every == 0:
            engine.sleep(1 + num_steps // every % 2)
            engine.wake_up()

    return {name: _answer(output) for name, output in run_all(engine, after_step=sleep).items()}


CASES: dict[str, Callable[[MakeEngine], Answers]] = {
    "batched": _batched,
    "chunked": _chunked,
    "bounded by time": _bounded_by_time,
    "one token at a time": _one_token_at_a_time,
    "unchunked": _unchunked,
    "cached": _cached,
    "cached after other use": _cached_after_other_use,
    "partly evicted": _partly_evicted,
    "preempted": _preempted,
    "preempted at every token": _preempted_at_every_token,
    "preempted, resumed from cache": _resumed_from_cache,
    "overlapped": _overlapped,
    "overlapped, in little memory": _overlapped_in_little_memory,
    "overlapped, preempted": _overlapped_and_preempted,
    "replayed": _replayed,
    "two threads": _two_threads,
    "blocks of 1": _blocks_of(1),
    "blocks of 8": _blocks_of(8),
    "blocks of 32": _blocks_of(32),
    "restarted": _restarted,
    "asleep": _asleep,
}


VARIANTS = {
    "bfloat16", "int8", "int4", "int8 cache", "fp8 cache", "experts", "int4 experts", "int8 latents",
    "images, bfloat16", "images seen whole",
}  # fmt: skip
"""Numbers that share their way through the engine with others, which the fast suite holds against
all circumstances; it holds these against some."""
ESSENTIAL = {
    "batched", "chunked", "cached after other use", "partly evicted", "preempted at every token",
    "overlapped, in little memory", "replayed",
}  # fmt: skip
IMPLIED = {"cached", "preempted", "overlapped", "restarted", "blocks of 8", "two threads"}
"""Circumstances that harder ones contain, or that do not depend on what is computed with: they are
tried in float32."""
ALIKE = {"bounded by time", "unchunked", "preempted, resumed from cache", "blocks of 32"}
"""Circumstances that are tried with all numbers but variants, whose steps differ from those of
others in what they compute with alone."""
IS_ALL = os.environ.get("QUIRE_TEST_CIRCUMSTANCES") == "all"
"""Try everything with everything."""


def _is_tried(numbers: str, case: str) -> bool:
    if (numbers, case) == ("images seen whole", "replayed"):
        return False  # here each of its steps has a row with an image, and is not recorded
    is_contained = numbers != "float32" and case in IMPLIED
    return IS_ALL or not (is_contained or (numbers in VARIANTS and case in ALIKE))


ALL_CIRCUMSTANCES = [
    pytest.param(numbers, case, marks=pytest.mark.slow if is_slow else ())
    for numbers, case in itertools.product(NUMBERS, CASES)
    if _is_tried(numbers, case)
    for is_slow in [
        (numbers in VARIANTS and case not in ESSENTIAL)
        or (case in IMPLIED and (numbers != "float32" or case not in ("restarted", "two threads")))
        or numbers == "images, bfloat16"
    ]
]


@pytest.mark.slow_combinations
@pytest.mark.parametrize(("numbers", "case"), ALL_CIRCUMSTANCES, indirect=["numbers"])
def test_bits_do_not_depend_on_circumstances(
    numbers: str, case: str, alone: Answers, make_engine: MakeEngine
) -> None:
    answers = CASES[case](lambda **options: _engine(make_engine, numbers, **options))
    assert answers.keys() == alone.keys()
    for name, answer in answers.items():
        assert answer == alone[name], name


SPECULATED = ("eagle", "eagle3", "mtp")
"""Heads that draft, and all of whose drafts are verified."""
_PLAIN: dict[bool, Answers] = {}


@pytest.mark.skipif(DEVICE != "cpu", reason="heads draft on the CPU")
@pytest.mark.parametrize(
    ("method", "case"),
    [
        pytest.param(method, case, marks=() if method == "mtp" and is_fast else pytest.mark.slow)
        for method, case in itertools.product(SPECULATED, CASES)
        # drafts lengthen steps that are bounded by time, and none are replayed
        if case not in ("replayed", "bounded by time") and (IS_ALL or case not in IMPLIED)
        for is_fast in [case == "cached after other use"]
    ],
)
def test_nor_do_they_depend_on_drafts_of_heads(
    method: str, case: str, make_engine: MakeEngine, request: pytest.FixtureRequest
) -> None:
    is_latent = method == "mtp"
    options: dict[str, Any] = {"dtype": "float32", "tokenizer": "quire-storyteller"}
    if is_latent:
        options["hf_overrides"] = LATENT | {"num_nextn_predict_layers": 1}
    if is_latent not in _PLAIN:
        _PLAIN[is_latent] = _batched(lambda **others: make_engine(**options, **others))
    config = None if is_latent else request.getfixturevalue(f"{method}_config")
    options |= by_head(method, config)
    found = CASES[case](lambda **others: draft_all(make_engine(**options, **others)))
    assert found == _PLAIN[is_latent]


@pytest.mark.slow  # instructions and engines alike take their time
@pytest.mark.skipif(DEVICE != "cpu", reason="instruction sets of the CPU")
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "latents"])
@pytest.mark.parametrize("isa", cpu.emulated_isas() if cpu.IMPORT_ERROR is None else [])
def test_nor_do_they_where_instructions_are_acted_out(
    isa: str, kind: str, make_engine: MakeEngine
) -> None:
    requests = {
        name: REQUESTS[name] for name in ("greedy-1", "greedy-17", "shared-33", "shared-49", "hot")
    }
    with cpu.using(isa=isa):
        alone: Answers = {}
        for name, request in requests.items():
            alone |= _answers(
                make_engine(**NUMBERS[kind], enable_prefix_caching=False), {name: request}
            )
        assert _answers(make_engine(**NUMBERS[kind]), requests) == alone
        chunked = make_engine(
            **NUMBERS[kind], max_num_batched_tokens=7, max_num_seqs=3, num_threads=2
        )
        assert _answers(chunked, requests) == alone


@pytest.mark.slow_combinations
@pytest.mark.parametrize(
    ("is_replayed", "circumstances"),
    [(True, {}), (False, {"num_blocks": 12, "max_num_batched_tokens": 50})],
    ids=["replayed", "in little memory"],
)
def test_tokens_that_stay_on_the_device_are_the_same(
    is_replayed: bool,
    circumstances: dict[str, Any],
    numbers: str,
    alone: Answers,
    make_engine: MakeEngine,
) -> None:
    """Without log-probabilities most rows are plain; those that are not end early,
    and meanwhile tokens are read at once."""
    engine = _engine(make_engine, numbers, **circumstances, overlap="on")
    device = LateDevice(engine) if DEVICE == "cpu" else None
    if is_replayed:
        replay_steps(engine)
    plain: dict[str, Any] = {"logprobs": None, "prompt_logprobs": None}
    # Grammars are compiled beside the steps: whoever waits for one would come in the middle, on a
    # slow machine.
    _submit(
        engine,
        {name: REQUESTS[name] for name in REQUESTS if name in ("json", "regex")},
        **plain,
        max_tokens=1,
    )
    run_all(engine)
    for name, (prompt, options) in REQUESTS.items():
        is_edited = name in ("penalties", "biased", "json", "regex", "thinking", "loop")
        engine.add_request(
            name,
            {"prompt_token_ids": prompt},
            _params(options, **plain, max_tokens=6 if is_edited else 18),
        )
    for name, output in run_all(engine).items():
        token_ids = output.outputs[0].token_ids
        assert (
            output.error is None and token_ids and token_ids == alone[name][0][0][: len(token_ids)]
        ), name
    assert device is None or device.num_late > 5


@pytest.mark.slow_combinations
@pytest.mark.parametrize(
    "circumstances", [{}, {"num_blocks": 12}, {"max_num_batched_tokens": 5, "max_num_seqs": 2}]
)
def test_forks_equal_separate_requests_with_derived_seeds(
    circumstances: dict[str, Any], numbers: str, make_engine: MakeEngine
) -> None:
    prompt, options = REQUESTS["shared-40"]
    forked = _engine(make_engine, numbers, **circumstances)
    forked.add_request("forked", {"prompt_token_ids": prompt}, _params(options, n=5))
    together = _answer(run_all(forked)["forked"])[:-1]
    single = _engine(make_engine, numbers, enable_prefix_caching=False)
    for index in range(5):
        seed = derive_seed(options["seed"], index)
        single.add_request(str(index), {"prompt_token_ids": prompt}, _params(options, seed=seed))
    apart = run_all(single)
    assert together == tuple(_answer(apart[str(index)])[0] for index in range(5))
    assert len({tuple(each[0]) for each in together}) > 1, (
        "all samples are equal: the seeds are not used"
    )


@pytest.mark.slow_combinations
@pytest.mark.parametrize(
    "company", [{}, {"hot": REQUESTS["hot"]}], ids=["alone", "beside a drawn row"]
)
def test_greedy_tokens_are_the_same_where_no_logits_are_kept(
    company: Requests, numbers: str, alone: Answers, make_engine: MakeEngine
) -> None:
    """Nobody asks for log-probabilities, so the head computes best tokens only;
    `alone` has them from logits."""
    engine = _engine(make_engine, numbers)
    greedy = {
        name: request for name, request in REQUESTS.items() if request[1] == {"temperature": 0.0}
    }
    assert len(greedy) > 3
    _submit(engine, {**greedy, **company}, logprobs=None, prompt_logprobs=None)
    outputs = run_all(engine)
    for name in greedy:
        assert outputs[name].outputs[0].token_ids == alone[name][0][0], name


STORY: dict[str, Any] = {
    "seed": 5, "n": 3, "temperature": 0.9, "max_tokens": 20, "min_tokens": 6, "logprobs": 2,
    "prompt_logprobs": 1, "stop": ["the ", "king", "."], "include_stop_str_in_output": True,
    "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
}  # fmt: skip


def _told(output: RequestOutput) -> tuple[Any, ...]:
    return (*_answer(output), *(each.text for each in output.outputs))


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_at_any_token_leaves_text_and_bits_alone(caching: bool) -> None:
    """At every token position, one to five times in a row: penalties, stop strings,
    log-probabilities and forks."""
    options: dict[str, Any] = {
        "kv_cache_memory": "16MiB",
        "num_threads": 1,
        "enable_prefix_caching": caching,
    }
    engine = build_engine(
        EngineConfig(model="quire-storyteller", device=DEVICE, overlap="off", **options)
    )
    prompt = "Once upon a time there lived a fox"
    engine.add_request("calm", prompt, SamplingParams(**STORY))
    calm = _told(run_all(engine)["calm"])
    assert any(reason == "stop" for *_, reason, _ in calm[:3]) and any(
        len(tokens) > 6 for tokens, *_ in calm[:3]
    )
    victims = {
        f"{first}-{times}": range(first, first + times)
        for first in range(1, 20)
        for times in (1, 3, 5)
    }
    for name in victims:
        engine.add_request(name, prompt, SamplingParams(**STORY))

    def preempt() -> None:
        scheduler = engine.scheduler
        for sequence in scheduler.running.copy():
            if sequence.num_output_tokens in victims[sequence.request.request_id]:
                scheduler.planner.preempt(sequence)

    outputs = run_all(engine, after_step=preempt)
    longest = max(len(tokens) for tokens, *_ in calm[:3])
    for name, output in outputs.items():
        assert output.metrics.num_preemptions > 0 or victims[name].start >= longest, name
        assert _told(output) == calm, name
    assert any(output.metrics.num_preemptions >= 5 for output in outputs.values())


CONCURRENT = ("float32", "latents", "images of any size")
"""Numbers that the fast suite computes with while streams come and go: a model of each kind."""


@pytest.mark.parametrize(
    ("numbers", "seed"),
    [
        pytest.param(numbers, seed, marks=pytest.mark.slow if is_slow else ())
        for numbers, seed in itertools.product(NUMBERS, range(3))
        if IS_ALL or seed == 0 or numbers not in VARIANTS
        for is_slow in [seed > 0 or numbers not in CONCURRENT]
    ],
    indirect=["numbers"],
)
def test_concurrent_streams_that_come_and_go_get_the_same_bits(
    seed: int, tiny_config: Path, numbers: str, alone: Answers
) -> None:
    """Through `AsyncLLM`, with arrivals, aborts and neighbours in an order that nobody controls."""
    rng = random.Random(seed)
    row_bytes = KV_FORMATS[
        NUMBERS[numbers].get("kv_cache_dtype", NUMBERS[numbers]["dtype"])
    ].row_bytes(16)
    options: dict[str, Any] = {"model": str(tiny_config), **NUMBERS[numbers]}
    requests = IMAGE_REQUESTS if "model" in NUMBERS[numbers] else REQUESTS
    llm = AsyncLLM(
        **options, load_format="dummy", kv_cache_memory=14 * 16 * 2 * 2 * 2 * row_bytes,
        num_threads=1, max_num_seqs=6, max_model_len=100, device=DEVICE,
    )  # fmt: skip

    async def ask(name: str) -> tuple[str, tuple[Any, ...] | None]:
        prompt, params = requests[name]
        await asyncio.sleep(rng.random() / 10)
        leaves = rng.random() < 0.3
        last: RequestOutput | None = None
        async for output in llm.generate(_given(name, prompt), _params(params)):
            last = output
            if leaves:
                return name, None
        assert last is not None and last.finished
        return name, _answer(last)

    async def ask_all() -> list[tuple[str, tuple[Any, ...] | None]]:
        return await asyncio.gather(*(ask(name) for name in [*requests] * 2))

    try:
        answers = asyncio.run(ask_all())
    finally:
        llm.close()
    assert any(answer is None for _, answer in answers)
    for name, answer in answers:
        assert answer is None or answer == alone[name], name


def test_a_quantized_cache_gives_other_bits(make_engine: MakeEngine) -> None:
    """Negative control: the cache of int8 and fp8 is really one of int8 and fp8."""
    request = {"greedy-17": REQUESTS["greedy-17"]}
    answers = [
        _answers(make_engine(kv_cache_dtype=each), request)
        for each in ("float32", "bfloat16", "int8", "fp8")
    ]
    assert all(first != second for i, first in enumerate(answers) for second in answers[:i])


def test_the_comparison_can_fail(make_engine: MakeEngine) -> None:
    """Negative control: another seed of the weights gives other bits."""
    request = {"greedy-16": REQUESTS["greedy-16"]}
    assert _answers(make_engine(seed=0), request) != _answers(make_engine(seed=1), request)
