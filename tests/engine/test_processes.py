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
USUAL = {
    "dense": ("int8", "tiny pool"),
    "experts": ("bfloat16", "int4", "drafts"),
    "latent": ("float32", "KV fp8"),
}
"""What is tried each time; all of it with QUIRE_TEST_DIVISIONS=all, which takes a quarter of an
hour."""


def cases() -> Iterator[tuple[str, str]]:
    is_all = os.environ.get("QUIRE_TEST_DIVISIONS") == "all"
    for model in MODELS:
        some = tuple(FORMS) if is_all else USUAL.get(model, ())
        for form in some if model in OF_ALL_FORMS else ("bfloat16",):
            yield model, form


@pytest.mark.parametrize(("model", "form"), list(cases()))
def test_every_division_gives_the_bits_of_one_process(
    tmp_path: Path, model: str, form: str
) -> None:
    (name, sizes), is_all = MODELS[model], os.environ.get("QUIRE_TEST_DIVISIONS") == "all"
    folder = write_model(tmp_path, name, **sizes | {"num_hidden_layers": 3})
    options = {"max_num_batched_tokens": 96} | FORMS[form]
    with engine_of(folder, **options) as engine:
        expected = answers(engine)
        num_preempted = engine.scheduler.stats.num_preemptions
    assert all(error is None for error, *_ in expected.values())
    if model == "dense":
        assert (num_preempted > 0) == (form == "tiny pool")
    for division, given in DIVISIONS.items():
        if "enable_expert_parallel" in given and model not in ("experts", "latent"):
            continue
        if "sockets" in division and not is_all and form != USUAL.get(model, ("",))[0]:
            continue
        with engine_of(folder, **options, **given) as engine:
            assert answers(engine) == expected, division
