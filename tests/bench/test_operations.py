"""Operations and bytes of steps, against counting by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.operations import CostModel
from quire.bench.roofline import Peaks, attained
from quire.core.plan import ONE_SAMPLE, RowWork
from quire.models.declaration import DecoderSpec
from quire.models.registry import declare

LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172  # weights of q and o, k and v, and the gated MLP
KEYS_AND_VALUES = 2 * 64 * 32
HEAD = 512 * 64
KV_BYTES = 5 * 2 * 4 * 8 * 4  # layers, K and V, heads, head size, float32


@pytest.fixture
def spec(tiny: str) -> DecoderSpec:
    return declare(json.loads(Path(tiny, "config.json").read_text()))


def test_a_decode_step(spec: DecoderSpec) -> None:
    cost = CostModel(spec, "float32").step(
        [RowWork(0, 9, 1, ONE_SAMPLE), RowWork(1, 99, 1, ONE_SAMPLE)]
    )
    attention = sum(5 * 4 * 64 * context for context in (10, 100))
    assert cost.flops == 2 * (5 * 2 * LAYER) + 2 * 2 * HEAD + attention
    assert cost.num_bytes == 4 * (5 * LAYER + HEAD) + KV_BYTES * (10 + 1 + 100 + 1)
    assert cost.num_tokens == 2


def test_a_chunk_that_samples_nothing(spec: DecoderSpec) -> None:
    cost = CostModel(spec, "bfloat16").step([RowWork(0, 16, 4)])
    assert cost.flops == 4 * (4 * 2 * LAYER + 2 * KEYS_AND_VALUES) + 4 * 4 * 64 * (
        17 + 18 + 19 + 20
    )
    assert cost.num_bytes == 2 * 5 * LAYER + KV_BYTES // 2 * (20 + 4)


def test_an_empty_step_costs_nothing(spec: DecoderSpec) -> None:
    assert CostModel(spec, "float32").step([]) == (0, 0, 0)


def test_chunking_a_prompt_changes_no_operations(spec: DecoderSpec) -> None:
    costs = CostModel(spec, "float32")
    whole = costs.step([RowWork(0, 0, 50, ONE_SAMPLE)])
    parts = [costs.step([RowWork(0, 0, 20)]), costs.step([RowWork(0, 20, 30, ONE_SAMPLE)])]
    assert whole.flops == sum(part.flops for part in parts)
    assert whole.num_bytes < sum(part.num_bytes for part in parts)


def test_windows_bound_attention_and_bytes() -> None:
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "hidden_act": "silu",
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "sliding_window": 8,
    }  # fmt: skip
    costs = CostModel(declare(config), "float32")
    near, far = costs.step([RowWork(0, 20, 1)]), costs.step([RowWork(0, 400, 1)])
    assert near == far


def test_attained_takes_the_larger_bound_of_each_step(spec: DecoderSpec) -> None:
    costs = [CostModel(spec, "float32").step([RowWork(0, 9, 1, ONE_SAMPLE)])] * 2
    cost = costs[0]
    peaks = Peaks(
        read_bytes_per_s=cost.num_bytes / 0.25,
        gemm_flops_per_s={"float32": cost.flops / 0.1, "bfloat16": 1.0},
        products={},
        num_samples=3,
    )
    result = attained(costs, 2.0, peaks)
    assert result.roofline_share == pytest.approx(0.25)  # two steps of 0.25 s each, in 2 s
    assert result.flops_share == pytest.approx(0.1) and result.bytes_share == pytest.approx(0.25)
    assert (
        result.peak_flops_per_s == peaks.gemm_flops_per_s["float32"]
        and result.peak_bytes_per_s == peaks.read_bytes_per_s
    )
    assert result.num_samples == 3
