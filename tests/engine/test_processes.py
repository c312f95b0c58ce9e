"""One table: however a model is divided among processes, its answers are those of one process, bit
for bit, log-probabilities included."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ranks import LATENT, OLMOE, answers, engine_of, needs_ranks, write_model

pytestmark = [needs_ranks, pytest.mark.slow]

MODELS: Mapping[str, tuple[str, dict[str, int]]] = {
    "dense": ("LlamaForCausalLM", {}),
    "experts": ("OlmoeForCausalLM", OLMOE),
    "latent": ("DeepseekV3ForCausalLM", LATENT),
    "windows": ("Gemma2ForCausalLM", {"sliding_window": 16}),
    "norms over heads": ("Olmo2ForCausalLM", {}),
}
FORMS: Mapping[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "KV fp8": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "tiny pool": {"dtype": "float32", "kv_cache_memory": "128KiB"},
    "drafts": {"dtype": "bfloat16", "speculative_config": {"method": "suffix"}},
}
TP, PP, DP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
DIVISIONS: Mapping[str, dict[str, Any]] = {
    "TP 2": {TP: 2},
    "TP 3": {TP: 3},
    "EP 2": {TP: 2, "enable_expert_parallel": True},
    "PP 2": {PP: 2},
    "PP 3": {PP: 3},
    "PP 2 of TP 2": {PP: 2, TP: 2},
    "PP 2 of EP 2": {PP: 2, TP: 2, "enable_expert_parallel": True},
    "PP 2 of TP 2 by sockets": {PP: 2, TP: 2, "distributed_executor_backend": "sockets"},
    "DP 2": {DP: 2},
    "DP 2 of TP 2": {DP: 2, TP: 2},
}
OF_ALL_FORMS = ("dense", "experts", "latent")
USUAL: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("dense", "int8"): ("TP 3", "PP 3", "PP 2 of TP 2 by sockets", "DP 2 of TP 2"),
    ("dense", "tiny pool"): ("PP 2 of TP 2", "DP 2"),
    ("experts", "bfloat16"): ("TP 3", "PP 2 of EP 2", "PP 2 of TP 2 by sockets"),
    ("experts", "int4"): ("EP 2", "PP 2 of TP 2"),
    ("experts", "drafts"): ("PP 3", "DP 2 of TP 2"),
    ("latent", "float32"): ("TP 3", "PP 2 of EP 2", "PP 2 of TP 2 by sockets"),
    ("latent", "KV fp8"): ("PP 3", "TP 2"),
    ("windows", "bfloat16"): ("TP 2", "PP 3"),
    ("norms over heads", "bfloat16"): ("TP 3", "PP 2"),
}
"""What is tried each time: the divisions that contain others, for a start of a process takes longer
than all that it computes. With QUIRE_TEST_DIVISIONS=all, every form in every division, which takes
a quarter of an hour."""
IS_ALL = os.environ.get("QUIRE_TEST_DIVISIONS") == "all"


def cases() -> Iterator[tuple[str, str]]:
    if not IS_ALL:
        yield from USUAL
        return
    for model in MODELS:
        for form in FORMS if model in OF_ALL_FORMS else ("bfloat16",):
            yield model, form


def divisions(model: str, form: str) -> tuple[str, ...]:
    if not IS_ALL:
        return USUAL[model, form]
    has_experts = model in ("experts", "latent")
    return tuple(
        name
        for name, given in DIVISIONS.items()
        if has_experts or "enable_expert_parallel" not in given
    )


def test_every_division_is_tried_each_time() -> None:
    assert {each for tried in USUAL.values() for each in tried} == {*DIVISIONS}
    assert {model for model, _ in USUAL} == {*MODELS}


@pytest.mark.parametrize(("model", "form"), list(cases()))
def test_every_division_gives_the_bits_of_one_process(
    tmp_path: Path, model: str, form: str
) -> None:
    name, sizes = MODELS[model]
    folder = write_model(tmp_path, name, **sizes | {"num_hidden_layers": 3})
    options = {"max_num_batched_tokens": 96} | FORMS[form]
    with engine_of(folder, **options) as engine:
        expected = answers(engine)
        num_preempted = engine.scheduler.stats.num_preemptions
    assert all(error is None for error, *_ in expected.values())
    if model == "dense":
        assert (num_preempted > 0) == (form == "tiny pool")
    for division in divisions(model, form):
        with engine_of(folder, **options, **DIVISIONS[division]) as engine:
            assert answers(engine) == expected, division
