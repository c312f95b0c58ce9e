"""A draft model with the target's own weights is always right: also where blocks are shared, given
up and computed again. If anything were wrong with its keys and values, it would not be."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import run_all
from guesses import by_model, draft_all, model_drafts
from ports import reserved_port

from quire.common.pages import CAN_DISCARD
from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.core.scheduler.tiers import RestoreCosts
from quire.engine.assembly.preparation import plan_engine
from quire.engine.loop.engine import Engine
from quire.errors import ConfigError, ModelNotFoundError, NotAvailableError
from tests.engine.conftest import DEVICE
from tests.engine.test_tiers import stats_of
from tests.engine.test_transfers import ASKED, answer

MakeEngine = Callable[..., Engine]
_RNG = random.Random(5)
_COMMON = [_RNG.randrange(3, 250) for _ in range(37)]
_PROMPTS = [[*_COMMON[:length], 7 * length % 250 + 3] for length in (1, 14, 15, 16, 30, 31, 36, 37)]
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9}, {"n": 3, "temperature": 0.8},
    {"temperature": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logprobs": 2, "logit_bias": {9: 3.0}},
    {"temperature": 0.0, "allowed_token_ids": [5, 6, 7, 8, 9]},
)  # fmt: skip


def _run(engine: Engine, after_step: Callable[[], None] = lambda: None) -> dict[str, list[Any]]:
    for number, (prompt, options) in enumerate(zip(_PROMPTS, _OPTIONS, strict=True)):
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=number, **options)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    outputs = run_all(engine, after_step)
    return {name: [each.token_ids for each in one.outputs] for name, one in outputs.items()}


def _num_wrong(engine: Engine) -> int:
    """Tokens that were verified and rejected where sequences did not end there."""
    stats = engine.scheduler.stats
    return stats.num_run_tokens - sum(stats.num_right_by_place)


@pytest.mark.slow_except("circumstances0")
@pytest.mark.parametrize(
    "circumstances",
    [
        {}, {"overlap": "on"}, {"block_size": 4}, {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_blocks": 9, "max_num_seqs": 6, "max_model_len": 128}, {"kv_cache_dtype": "int8"},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    ],
)  # fmt: skip
def test_the_targets_own_weights_draft_what_it_says(
    circumstances: dict[str, Any], make_engine: MakeEngine, tiny_config: Path
) -> None:
    engine = draft_all(make_engine(**by_model(tiny_config), **circumstances))
    rng = random.Random(3)

    def preempt() -> None:
        scheduler = engine.scheduler
        for sequence in scheduler.running.copy():
            if rng.random() < 0.05:
                scheduler.planner.preempt(sequence)

    found = [_run(engine), _run(engine), _run(engine, preempt)]
    plain = make_engine(**circumstances)
    plain.scheduler.look_ahead = None
    assert found == [_run(plain)] * 3
    stats = engine.scheduler.stats
    assert stats.num_run_tokens > 400
    assert _num_wrong(engine) <= 2, stats.num_right_by_place


@pytest.mark.skipif(not CAN_DISCARD or DEVICE != "cpu", reason="this system takes no pages back")
@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_with_its_target_and_drafts_as_well_after(
    make_engine: MakeEngine, tiny_config: Path, level: int
) -> None:
    engine, expected = draft_all(make_engine(**by_model(tiny_config))), _run(make_engine())
    assert _run(engine) == expected
    for _ in range(2):
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        engine.add_request("late", {"prompt_token_ids": _PROMPTS[6]}, params)
        for _ in range(4):
            engine.step()
        engine.sleep(level)
        engine.wake_up()
        run_all(engine)
        assert _run(engine) == expected
    assert _num_wrong(engine) <= 2, engine.scheduler.stats.num_right_by_place


@pytest.mark.slow
def test_what_is_restored_of_its_target_it_computes_itself(
    make_engine: MakeEngine, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestoreCosts, "restore_s", lambda self, count: 0.0)
    options = {"block_size": 4, "kv_cache_dir": str(tmp_path), **by_model(tiny_config)}
    for is_second in (False, True):
        engine = draft_all(make_engine(**options))
        assert _run(engine) == _run(make_engine(block_size=4))
        assert (stats_of(engine).num_restored_blocks > 5) == is_second
        assert engine.scheduler.stats.num_run_tokens > 100
        assert _num_wrong(engine) <= 1, engine.scheduler.stats.num_right_by_place
        while engine.idle():
            pass
        engine.close()


def test_what_another_engine_has_computed_of_its_target_it_computes_itself(
    make_engine: MakeEngine, tiny_config: Path, tmp_path: Path
) -> None:
    place = {"kv_port": reserved_port(), "kv_connector_extra_config": {"folder": str(tmp_path)}}
    engines = []
    for role in ("producer", "consumer"):
        transfer = {"kv_connector": "TcpConnector", "kv_role": f"kv_{role}", **place}
        made = make_engine(block_size=4, kv_transfer_config=transfer, **by_model(tiny_config))
        engines.append(draft_all(made))
    producer, consumer = engines
    found = answer(producer, ASKED, _COMMON, max_tokens=1).kv_transfer_params
    drafted = answer(consumer, found, _COMMON, max_tokens=40, logprobs=None)
    plain = answer(make_engine(), None, _COMMON, max_tokens=40, logprobs=None)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    stats = consumer.scheduler.stats
    assert stats.num_prefix_hit_tokens == 36 and stats.num_run_tokens > 20
    assert _num_wrong(consumer) == 0


def test_prompts_are_caught_up_with_little_by_little(
    make_engine: MakeEngine, tiny_config: Path
) -> None:
    engine = draft_all(make_engine(**by_model(tiny_config), num_blocks=32))
    drafts = model_drafts(engine)
    drafts._draft = replace(drafts._draft, max_read=40)
    long = _COMMON * 5
    for name in ("first", "second"):
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
        engine.add_request(name, {"prompt_token_ids": long}, params)
    run_all(engine)
    # 185 tokens are computed in five steps for the first, in fewer for the second that shares them
    assert engine.scheduler.stats.num_run_tokens > 20
    assert _num_wrong(engine) == 0


@pytest.mark.slow
def test_a_draft_model_that_fails_ends_nothing(
    make_engine: MakeEngine, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine()
    engine = draft_all(make_engine(**by_model(tiny_config)))
    drafts = model_drafts(engine)
    choose, calls = drafts._add_tokens, 0

    def failing(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise RuntimeError("no memory")
        choose(*given)

    monkeypatch.setattr(drafts, "_add_tokens", failing)
    assert _run(engine) == _run(plain)
    assert calls == 6
    assert _run(engine) == _run(plain)


def test_sequences_beyond_its_context_are_not_drafted(
    make_engine: MakeEngine, tiny_config: Path
) -> None:
    options = by_model(tiny_config)
    options["speculative_config"]["max_model_len"] = 24
    engine = draft_all(make_engine(**options))
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    engine.add_request("long", {"prompt_token_ids": _COMMON[:10]}, params)
    outputs = run_all(engine)
    assert len(outputs["long"].outputs[0].token_ids) == 60
    assert 10 <= sum(engine.scheduler.stats.num_right_by_place) <= 15
    assert _num_wrong(engine) == 0


def test_the_plan_counts_it(tiny_config: Path, draft_config: Path) -> None:
    def plan(**options: Any) -> Any:
        options = {"kv_cache_memory": "1MiB", "max_num_seqs": 8, **options}
        config = EngineConfig(model=str(tiny_config), load_format="dummy", **options)
        return plan_engine(config).plan

    plain, drafting = plan(), plan(**by_model(draft_config))
    assert drafting.draft.block_bytes == 16 * 2 * 2 * 16 * 4
    assert drafting.limits.num_blocks == (1 << 20) // (16 * (8 + 4) * 16 * 4)
    assert drafting.limits.num_blocks < plain.limits.num_blocks
    ((value, reason),) = [
        (each.value, each.reason) for each in drafting.decisions if each.name == "draft_model"
    ]
    assert value == "LlamaForCausalLM" and "256 B a token in the KV cache" in reason
    assert drafting.total_bytes > plain.total_bytes + drafting.draft.block_bytes * 8 * 2


def test_what_cannot_draft_is_refused(tiny_config: Path, tmp_path: Path) -> None:
    def plan(path: Path) -> None:
        plan_engine(EngineConfig(model=str(tiny_config), load_format="dummy", **by_model(path)))

    with pytest.raises(ModelNotFoundError, match="speculative_config: the draft model: "):
        plan(tmp_path / "nowhere")
    base = json.loads(tiny_config.read_text())
    bert = tmp_path / "bert.json"
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    bert.write_text(
        json.dumps({
            **{name: base[name] for name in kept}, "architectures": ["BertModel"],
            "model_type": "bert", "hidden_act": "gelu", "type_vocab_size": 2, "vocab_size": 256,
            "layer_norm_eps": 1e-12, "num_attention_heads": 4,
        })
    )  # fmt: skip
    with pytest.raises(ConfigError, match="cannot draft"):
        plan(bert)
    windows = tmp_path / "windows.json"
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    windows.write_text(json.dumps({**base, **mistral, "sliding_window": 64}))
    config = EngineConfig(model=str(windows), load_format="dummy", **by_model(tiny_config))
    with pytest.raises(NotAvailableError, match="sliding windows"):
        plan_engine(config)
