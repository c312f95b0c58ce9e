"""The ideal schedule: every distinct prompt token once, weights once a step."""

from __future__ import annotations

import pytest

from quire.bench.bound import MachineRates, bandwidth_s, compute_s, ideal_steps, roofline_s
from quire.bench.operations import CostModel
from quire.bench.workload import BenchRequest, random_workload
from quire.core.plan import ONE_SAMPLE, RowWork
from quire.models.registry import declare

SPEC = declare(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "hidden_act": "silu",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
)  # fmt: skip
LAYERS, HEAD, OUTPUTS = SPEC.flops_per_token()


def test_one_request_costs_what_its_steps_cost() -> None:
    steps = ideal_steps(SPEC, [BenchRequest(list(range(7)), 3)], 2)
    costs = CostModel(SPEC, "bfloat16")
    spans = [(0, 7), (7, 1), (8, 1)]
    exact = [
        costs.step([RowWork(row=0, start=start, num_tokens=length, tasks=ONE_SAMPLE)])
        for start, length in spans
    ]
    assert [step.linear_flops + step.attention_flops for step in steps] == [
        cost.flops for cost in exact
    ]
    assert [step.num_bytes for step in steps] == [cost.num_bytes for cost in exact]


def test_shared_beginnings_are_computed_once() -> None:
    shared = list(range(20))
    apart = ideal_steps(SPEC, [BenchRequest([*shared, 50 + i], 1) for i in range(3)], 2)[0]
    assert apart.linear_flops == (20 + 3) * LAYERS - 20 * OUTPUTS + 3 * HEAD
    # Of equal prompts, the last token still gives its own logits.
    same = ideal_steps(SPEC, [BenchRequest(shared, 1) for _ in range(3)], 2)[0]
    assert same.linear_flops == (20 + 2) * LAYERS - 19 * OUTPUTS + 3 * HEAD
    shorter = ideal_steps(SPEC, [BenchRequest(shared, 1), BenchRequest(shared[:5], 1)], 2)[0]
    assert shorter.linear_flops == 20 * LAYERS - 18 * OUTPUTS + 2 * HEAD


def test_sequences_of_one_prompt_decode_apart() -> None:
    first, second = ideal_steps(SPEC, [BenchRequest(list(range(4)), 2, num_sequences=3)], 2)
    assert first.linear_flops == 4 * LAYERS - 3 * OUTPUTS + HEAD
    assert second.linear_flops == 3 * (LAYERS + HEAD)


def test_finished_sequences_cost_nothing() -> None:
    steps = ideal_steps(SPEC, [BenchRequest([1, 2], 1), BenchRequest([3, 4], 3)], 2)
    assert [step.linear_flops for step in steps[1:]] == [LAYERS + HEAD] * 2


def test_the_roofline_is_above_both_of_its_sides() -> None:
    steps = ideal_steps(SPEC, random_workload(8, (4, 40), (1, 9)).requests(0, 128), 2)
    rates = MachineRates(linear_flops=2e9, attention_flops=1e9, num_bytes=1e9)
    flops = (
        sum(step.linear_flops for step in steps) / 2e9
        + sum(step.attention_flops for step in steps) / 1e9
    )
    assert compute_s(steps, rates) == pytest.approx(flops)
    assert bandwidth_s(steps, rates) == pytest.approx(sum(step.num_bytes for step in steps) / 1e9)
    assert max(compute_s(steps, rates), bandwidth_s(steps, rates)) <= roofline_s(steps, rates)
    assert roofline_s(steps, rates) <= compute_s(steps, rates) + bandwidth_s(steps, rates)
    narrow = ideal_steps(SPEC, random_workload(8, (4, 40), (1, 9)).requests(0, 128), 0.5)
    assert bandwidth_s(narrow, rates) < bandwidth_s(steps, rates) and compute_s(
        narrow, rates
    ) == compute_s(steps, rates)
