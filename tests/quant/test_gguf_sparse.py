"""GGUF files of gpt-oss and DeepSeek against their floating-point twins in Hugging Face's layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_sparse import store_deepseek, store_gpt_oss
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import plan_engine
from quire.engine.plan.experts import expert_bytes
from quire.errors import CheckpointError, UnsupportedModelError
from quire.kernels import cpu
from quire.models.registry import declare
from quire.weights.gguf.file import read_gguf
from quire.weights.gguf.model import GgufModel
from tests.golden.checkpoints import CONFIGS, VOCAB, write_checkpoint

PROMPT = [(7 * i * i + 3 * i + 11) % 250 + 2 for i in range(40)]
_MSCALE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_MSCALE |= {"mscale": 0.707, "mscale_all_dim": 0.707}
_SIZES: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
}
_SIZES |= {"rope_scaling": _MSCALE, "torch_dtype": "float32", "max_position_embeddings": 256}
DEEPSEEK: dict[str, dict[str, Any]] = {
    "v2 lite": {"name": "deepseek v2", "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "v2": {"name": "deepseek v2", "q_lora_rank": 40},
    "v3": {"name": "deepseek v3", "routed_scaling_factor": 2.5},
}
BLOCKS = {"attn_k_b": "Q8_0", "attn_v_b": "Q5_0", "attn_kv_b": "Q8_0", "ffn_down_exps": "Q4_0"}
BLOCKS |= {"ffn_gate_exps": "Q8_0", "ffn_up_exps": "Q8_0", "attn_output": "Q8_0"}


def logprobs(model: Path, **options: Any) -> Tensor:
    """[prompt, vocabulary]"""
    options = {"dtype": "float32", "kv_cache_memory": "1MiB", "num_threads": 1} | options
    with LLM(str(model), skip_tokenizer_init=True, max_logprobs=-1, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=VOCAB)
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    places = [place for place in output.prompt_logprobs or () if place is not None]
    return torch.tensor([[place[token].logprob for token in range(VOCAB)] for place in places])


def deepseek_checkpoint(tmp_path: Path, case: str) -> Path:
    changes = dict(DEEPSEEK[case])
    return write_checkpoint(
        tmp_path / "original", {**CONFIGS[changes.pop("name")], **_SIZES, **changes}
    )


@pytest.mark.slow_combinations
@pytest.mark.parametrize("encodings", [{}, BLOCKS], ids=["floats", "blocks"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("case", DEEPSEEK)
def test_deepseek_computes_what_its_twin_computes(
    case: str, is_split: bool, encodings: dict[str, str], tmp_path: Path
) -> None:
    original = deepseek_checkpoint(tmp_path, case)
    file, twin = store_deepseek(tmp_path, original, encodings, is_split=is_split)
    wanted = logprobs(twin)
    assert wanted.std() > 0.1
    torch.testing.assert_close(logprobs(file), wanted, atol=1e-3 if encodings else 1e-5, rtol=0)


MXFP4 = {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"}


def gpt_oss_checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "original", CONFIGS["gpt oss"])


@pytest.mark.parametrize("encodings", [{}, MXFP4 | {"attn_q": "Q8_0"}], ids=["floats", "mxfp4"])
def test_gpt_oss_computes_what_its_twin_computes(encodings: dict[str, str], tmp_path: Path) -> None:
    file, twin = store_gpt_oss(tmp_path, gpt_oss_checkpoint(tmp_path), encodings)
    wanted = logprobs(twin)
    assert wanted.std() > 0.1
    torch.testing.assert_close(logprobs(file), wanted, atol=1e-3 if encodings else 1e-5, rtol=0)


def test_gpt_oss_keeps_its_numbers_of_four_bits(tmp_path: Path) -> None:
    file, _ = store_gpt_oss(tmp_path, gpt_oss_checkpoint(tmp_path), MXFP4)
    plan = plan_engine(EngineConfig(model=str(file))).plan
    held = [plan.formats.of(parts) for parts in plan.spec.projections]
    assert sum(each is not None and each.is_mxfp4 for each in held) == 2 * 3
    [decision] = [each for each in plan.decisions if each.name == "quantization"]
    assert "MXFP4" in decision.reason


@pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="only native kernels page experts")
def test_experts_of_four_bits_may_lie_in_a_file(tmp_path: Path) -> None:
    """And give the same answers, whatever share of them is in memory."""
    file, _ = store_gpt_oss(tmp_path, gpt_oss_checkpoint(tmp_path), MXFP4)
    want = logprobs(file)
    plan = plan_engine(EngineConfig(model=str(file))).plan
    whole = expert_bytes(plan.spec, plan.formats, "float32")
    for share in (0.9, 0.4):
        options = {"expert_memory": int(share * whole), "weights_cache": str(tmp_path / "cache")}
        assert torch.equal(logprobs(file, **options), want)


def test_gate_and_up_of_gpt_oss_have_one_encoding(tmp_path: Path) -> None:
    mixed = MXFP4 | {"ffn_up_exps": "Q8_0"}
    file, _ = store_gpt_oss(tmp_path, gpt_oss_checkpoint(tmp_path), mixed)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up_exps\.weight is Q8_0.*one encoding"):
        plan_engine(EngineConfig(model=str(file)))


def test_a_config_is_that_of_the_twin(tmp_path: Path) -> None:
    file, twin = store_deepseek(tmp_path, deepseek_checkpoint(tmp_path, "v3"), {}, is_split=True)
    wanted = json.loads((twin / "config.json").read_text())
    found = GgufModel.of(read_gguf(file)).config
    unread = {"head_dim", "hidden_act", "torch_dtype", "bos_token_id", "eos_token_id"}
    for key, value in wanted.items():
        if key not in unread and key != "rope_scaling":
            assert found[key] == pytest.approx(value), key
    scaling: Any = found["rope_scaling"]
    assert scaling == {key: pytest.approx(value) for key, value in _MSCALE.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deepseek2.expert_gating_func": 7}, "expert_gating_func=7; supported: 1 .softmax"),
        ({"deepseek2.rope.dimension_count": 64}, "rope.dimension_count=64; supported: less than"),
        ({"deepseek2.expert_weights_norm": 3}, "expert_weights_norm=3; supported: true or false"),
        ({"deepseek2.expert_used_count": 13}, "num_experts_per_tok"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file, _ = store_deepseek(tmp_path, deepseek_checkpoint(tmp_path, "v2"), {}, is_split=True)
    read = read_gguf(file)
    metadata = {**read.metadata, **change}
    changed = GgufModel.of(replace(read, metadata=metadata))
    with pytest.raises(UnsupportedModelError, match=message):
        declare(changed.config)
