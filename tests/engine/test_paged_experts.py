"""A model of which only some experts are in memory: the same answers at every share, what is counted
and planned, and a file that is damaged while requests run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.core.experts import ExpertUse
from quire.core.scheduler.experts import CountedExperts
from quire.engine.assembly.preparation import plan_engine
from quire.engine.loop.counters import count
from quire.engine.plan.experts import expert_bytes
from quire.engine.plan.machine import Machine
from quire.errors import CapacityError, ConfigError, QuireError
from quire.kernels import cpu

if cpu.IMPORT_ERROR is not None:
    pytest.skip(f"no native kernels: {cpu.IMPORT_ERROR}", allow_module_level=True)

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 200,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def _llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), load_format="dummy", kv_cache_memory="4MiB", num_threads=1, **options)


def _answers(llm: LLM, num_requests: int) -> list[object]:
    prompts: Any = [
        {"prompt_token_ids": [(7 * i + j * j) % 200 for j in range(9 + i)]}
        for i in range(num_requests)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def _whole(model: Path, quantization: str | None = None) -> int:
    plan = _plan(model, quantization=quantization)
    return expert_bytes(plan.spec, plan.formats, plan.dtype)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_answers_do_not_depend_on_what_is_in_memory(
    model: Path, tmp_path: Path, quantization: str | None
) -> None:
    with_all = _llm(model, quantization=quantization)
    want = _answers(with_all, 16)
    assert count(with_all.engine.scheduler).num_expert_hits == 0
    for share in (1.0, 0.5, 0.1):
        options = {"expert_memory": int(share * _whole(model, quantization)) + 1}
        llm = _llm(
            model, quantization=quantization, weights_cache=str(tmp_path / "cache"), **options
        )
        try:
            assert _answers(llm, 16) == want
            assert _answers(llm, 1) == want[:1]
            use = count(llm.engine.scheduler)
        finally:
            llm.close()
        assert (use.num_expert_misses == 0) == (share == 1.0) and use.num_expert_hits > 0
        assert (use.expert_bytes_read > 0) == (use.expert_wait_s > 0) == (share < 1.0)


def test_a_damaged_file_ends_requests_and_names_itself(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = {"expert_memory": _whole(model) // 8, "weights_cache": str(cache)}
    llm = _llm(model, **options)
    want = _answers(llm, 2)
    (path,) = cache.glob("*.experts.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 4] + bytes(len(whole) // 2) + whole[-len(whole) // 4 :])
    llm.reset_prefix_cache()
    prompt: Any = {"prompt_token_ids": [3, 4, 5]}
    failed = llm.generate(prompt, use_tqdm=False)[0]
    assert failed.outputs[0].finish_reason == "error"
    assert f"{path.name}: expert " in str(failed.error) and "has other bytes" in str(failed.error)
    assert str(cache) not in str(failed.error)  # clients see it
    path.write_bytes(whole)
    llm.reset_prefix_cache()
    assert _answers(llm, 2) == want
    llm.close()
    path.write_bytes(whole[:-5])
    with pytest.raises(QuireError, match=f"{path.name}.*bytes? "):
        _llm(model, **options)


def _plan(path: Path, free: int = 8192 * MIB, **options: Any) -> Any:
    machine = Machine(total_memory=2 * free, available_memory=free, num_cores=4, cpu_name="test")
    config = EngineConfig(model=str(path), load_format="dummy", **options)
    return plan_engine(config, machine).plan


def test_the_plan_counts_the_pool_and_predicts_hits(model: Path) -> None:
    with_all, whole = _plan(model), _whole(model)
    plan = _plan(model, expert_memory=whole // 2, weights_cache="x")
    assert plan.experts.num_resident == 24 and plan.experts.hit_rate == 0.5
    assert 0.5 < plan.experts.likely_hit_rate < 1.0
    assert with_all.weight_bytes - plan.weight_bytes == whole // 2
    assert plan.step_costs.step_s > with_all.step_costs.step_s
    (decision,) = [each for each in plan.decisions if each.name == "expert_memory"]
    assert decision.reason.startswith("24 of 48 experts: 50% of choices")


def test_a_machine_that_is_too_small_is_told_what_would_fit(model: Path) -> None:
    large = {**CONFIG, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
    model.write_text(json.dumps(large))
    with pytest.raises(CapacityError) as refusal:
        _plan(model, free=3000 * MIB)
    found = str(refusal.value)
    assert "does not fit" in found and "expert_memory='" in found and "of 384 experts" in found
    suggested = found.split("expert_memory='")[1].split("'")[0]
    plan = _plan(model, free=3000 * MIB, expert_memory=suggested, weights_cache="x")
    assert plan.total_bytes <= 0.9 * 3000 * MIB


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"expert_memory": "1MiB"}, "needs weights_cache"),
        ({"expert_memory": 1000, "weights_cache": "x"}, "holds 0 experts .* needs 4 of a layer"),
        (
            {"expert_memory": "1MiB", "weights_cache": "x", "kernels": "reference"},
            "not available with kernels='reference'",
        ),
    ],
)
def test_what_cannot_work_is_refused(model: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        _plan(model, **options)


def test_a_model_without_experts_has_no_use_for_it(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match="has no experts; leave it out"):
        _plan(tiny_config, expert_memory="1MiB", weights_cache="x")


def test_the_use_of_experts_adds_up() -> None:
    counted = CountedExperts()
    for use in (ExpertUse(3, 1, 100, 0.5, 4, 2, 80), ExpertUse(1, 0, 0, 0.0)):
        assert counted.take_news((tuple(use),), 0.0) == []
    assert counted.use == ExpertUse(4, 1, 100, 0.5, 4, 2, 80)
    assert counted.use.minus(ExpertUse(1, 1, 50, 0.5, 2, 1, 80)) == ExpertUse(
        3, 0, 50, 0.0, 2, 1, 0
    )
    assert counted.take_orders(0.0) == () and counted.parked() == []
