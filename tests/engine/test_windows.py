"""Models with sliding windows give blocks back while they run, and no circumstance changes a bit.

The circumstances are those of `test_exactness`; the reference has every layer in one group that
keeps everything, as if there were no windows but in attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import run_all

from quire.config.engine import EngineConfig
from quire.core.kvcache.prefix import NO_BLOCK
from quire.engine.assembly import builder
from quire.engine.loop.engine import Engine
from quire.engine.plan import planning
from quire.models.kv_layout import KVLayout
from tests.engine import test_exactness as exactness
from tests.engine.conftest import TINY_LLAMA

SMALL = TINY_LLAMA | {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
GEMMA3 = SMALL | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
}
MISTRAL = SMALL | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_key_value_heads": 1,
    "sliding_window": 20,
}
MODELS = {
    "gemma3": (GEMMA3, (None, 9, 9)),
    "mistral": (MISTRAL, (20,)),
}
"""Configs, and the windows of their groups: Gemma's have two layers each."""

Make = Callable[..., Engine]


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(family: str, tmp_path: Path) -> Iterator[Make]:
    """Builds engines around a tiny model; `num_blocks` is as many for each group."""
    config, windows = MODELS[family]
    (tmp_path / "config.json").write_text(json.dumps(config))
    engines: list[Engine] = []

    def build(**options: Any) -> Engine:
        block_size = options.setdefault("block_size", 16)
        num_blocks = options.pop("num_blocks", 256 // block_size * 4) * len(windows)
        layer_bytes = 2 * 16 * 4
        settings = {
            "dtype": "float32",
            "num_threads": 1,
            "max_num_seqs": 16,
            "tokenizer": "quire-storyteller",
            "kv_cache_memory": num_blocks * block_size * 2 * layer_bytes,
        }
        engine = builder.build_engine(
            EngineConfig(model=str(tmp_path), load_format="dummy", **settings | options)
        )
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


_WHOLE: dict[str, exactness.Answers] = {}


@pytest.fixture
def whole(family: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> exactness.Answers:
    """The reference: each request alone, with one block table that keeps everything."""
    if family not in _WHOLE:

        def one_group(layers: Any, max_model_len: int) -> KVLayout:
            return KVLayout((None,), (0,) * len(layers), tuple(range(len(layers))))

        with monkeypatch.context() as patch:
            patch.setattr(planning, "lay_out", one_group)
            _WHOLE[family] = {}
            for name, request in exactness.REQUESTS.items():
                engine = make(enable_prefix_caching=False)
                assert engine.plan.limits.windows == (None,)
                _WHOLE[family] |= exactness._answers(engine, {name: request})
    return _WHOLE[family]


QUICK = ("chunked", "overlapped, in little memory")


@pytest.mark.slow_combinations
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
        for case in exactness.CASES
    ],
)
def test_bits_are_those_of_a_cache_that_keeps_everything(
    case: str, family: str, whole: exactness.Answers, make: Make, given_back: list[int]
) -> None:
    answers = exactness.CASES[case](make)
    assert answers.keys() == whole.keys()
    for name, answer in answers.items():
        assert answer == whole[name], name
    assert given_back or "preempted" in case, "no block was given back"


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries of block tables that were given back so far."""
    from quire.core.kvcache.manager import KVCacheManager

    entries: list[int] = []
    give_back = KVCacheManager.give_back

    def watched(self: KVCacheManager, *args: Any) -> list[int]:
        found = give_back(self, *args)
        entries.extend(found)
        return found

    monkeypatch.setattr(KVCacheManager, "give_back", watched)
    return entries


def test_forks_have_the_bits_of_requests_of_their_own(make: Make, family: str) -> None:
    prompt, options = exactness._prompt(5, 40), {"seed": 3, "logprobs": 2, "max_tokens": 30}
    answers = []
    for limits in ({}, {"num_blocks": 6, "max_num_batched_tokens": 12, "max_num_seqs": 4}):
        engine = make(**limits)
        exactness._submit(engine, {"forks": (prompt, options)}, n=3)
        [output] = run_all(engine).values()
        answers.append(exactness._answer(output))
    assert answers[0] == answers[1]


def test_a_sequence_may_be_longer_than_the_pool(make: Make, family: str) -> None:
    """With windows alone, a few blocks serve any length; beside full attention, many more do."""
    engine = make(
        num_blocks=8, block_size=8, max_num_batched_tokens=16, enable_prefix_caching=False
    )
    prompt = exactness._prompt(21, 100 if family == "mistral" else 60)
    exactness._submit(engine, {"long": (prompt, {"temperature": 0.0})})
    answers = run_all(engine)
    assert len(answers["long"].outputs[0].token_ids) == 18
    peak, num_groups = engine.scheduler.stats.peak_num_blocks, len(MODELS[family][1])
    assert peak < num_groups * ((len(prompt) + 17) // 8 + 1)


def test_what_is_given_back_is_said_to_the_worker(make: Make, family: str) -> None:
    """Nothing that lies before a window is named by a row, so that nothing could be read there."""
    engine = make(block_size=4, max_num_batched_tokens=16, max_num_seqs=1)
    exactness._submit(engine, {"one": (exactness._prompt(3, 50), {"temperature": 0.0})})
    tables: list[list[int]] = []
    worker = engine.executor.worker  # type: ignore[attr-defined]

    def look() -> None:
        row = worker.rows.block_tables[0, : worker.rows.num_blocks[0]]
        tables.append(row.tolist())

    run_all(engine, after_step=look)
    windows = MODELS[family][1]
    for group, window in enumerate(windows):
        named = [table[group :: len(windows)] for table in tables]
        assert (NO_BLOCK in named[-1]) == (window is not None)


def test_the_plan_says_what_windows_spare(make: Make, family: str) -> None:
    plan = make().plan
    assert plan.limits.windows == MODELS[family][1]
    [decision] = [each for each in plan.decisions if each.name == "kv_groups"]
    assert "a window of" in decision.reason
    narrow = replace(plan.limits, max_num_batched_tokens=16, max_num_seqs=16)
    assert narrow.num_sequences(256) > plan.limits.num_slots // 256
