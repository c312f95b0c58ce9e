"""The whole engine on the Triton kernels: the reference's greedy tokens,
and one sequence's results in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from late_device import LateDevice
from replayed import replay_steps

from quire import LLM, SamplingParams
from quire.kernels.interface import Kernels

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
PROMPTS = [[5, 6, 7, 8, 9], [20, 21], [7] * 13]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return str(path)


def generate(
    model: str, prompts: list[list[int]], params: SamplingParams, **options: Any
) -> list[tuple[int, ...]]:
    llm = LLM(
        model, load_format="dummy", kv_cache_memory="1MiB", max_num_seqs=4, block_size=8, **options
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def ours(device: torch.device) -> dict[str, Any]:
    return {"kernels": "triton", "device": device.type}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_greedy_tokens_are_the_references(
    model: str, device: torch.device, quantization: str | None
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompts = PROMPTS if quantization is None else PROMPTS[1:2]
    options = {
        "quantization": quantization,
        "kv_cache_dtype": "auto" if quantization is None else "int8",
    }
    got = generate(model, prompts, params, **options, **ours(device))
    assert got == generate(model, prompts, params, **options, kernels="reference")


@pytest.mark.usefixtures("kernels")
def test_company_and_chunks_change_no_token(model: str, device: torch.device) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=2, ignore_eos=True)
    together = generate(model, PROMPTS[1:], params, dtype="bfloat16", **ours(device))
    alone = generate(
        model, PROMPTS[2:], params, dtype="bfloat16", max_num_batched_tokens=8, **ours(device)
    )
    assert alone == together[1:]


def test_the_back_end_knows_its_device(kernels: Kernels, device: torch.device) -> None:
    assert kernels.device == device


@pytest.mark.usefixtures("kernels")
def test_padded_and_replayed_steps_give_the_same_bits(model: str, device: torch.device) -> None:
    """Decodes beside pieces of prompts, with attention launched for
    longer contexts than there are."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    options = {
        "kv_cache_memory": "64KiB",
        "max_num_seqs": 3,
        "block_size": 8,
        "max_num_batched_tokens": 5,
        **ours(device),
    }
    answers = []
    for is_replayed in (False, True):
        llm = LLM(model, load_format="dummy", **options)
        graphs = replay_steps(llm.engine) if is_replayed else None
        caches = [tensor for pair in llm.engine.executor.worker.memory.caches for tensor in pair]  # type: ignore[attr-defined]
        for cache in caches:
            cache.zero_()
        outputs = llm.generate([[5, 6, 7], [7] * 6], params, use_tqdm=False)
        assert graphs is None or {shape.num_tokens for shape in graphs.shapes} == {1, 8}
        blocks = [cache[: llm.engine.plan.limits.num_blocks].tolist() for cache in caches]
        answers.append(([output.outputs for output in outputs], blocks))
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("kernels")
def test_tokens_that_stay_on_the_device_are_the_same(model: str, device: torch.device) -> None:
    """Where there is no GPU, on a stand-in whose results are late;
    padded steps fill in tokens as they were recorded."""
    params = [
        SamplingParams(temperature=float(seed > 1), seed=seed, max_tokens=3, ignore_eos=True)
        for seed in (1, 2)
    ]
    answers = []
    for overlap in ("off", "on"):
        options = {
            "max_num_seqs": 2,
            "block_size": 8,
            "kv_cache_memory": "64KiB",
            "overlap": overlap,
            **ours(device),
        }
        llm = LLM(model, load_format="dummy", **options)
        late = LateDevice(llm.engine) if overlap == "on" and device.type == "cpu" else None
        if overlap == "on":
            replay_steps(llm.engine)
        outputs = llm.generate([[5, 6, 7], [20, 21]], params, use_tqdm=False)
        answers.append([output.outputs for output in outputs])
        assert late is None or late.num_late > 1
    assert answers[0] == answers[1]
