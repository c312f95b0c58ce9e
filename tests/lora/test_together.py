"""Adapters beside all that else changes how a request is computed: drafts, forms of answers, blocks
that are shared, and requests that give theirs up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from adapters import MakeLLM, write_adapter, write_whole_adapter

from quire import LoRARequest, SamplingParams
from quire.core.structure import StructuredOutputsParams
from quire.engine.loop.engine import Engine
from quire.llm import LLM
from quire.models.registry import declare
from quire.outputs import RequestOutput
from quire.weights.folder import read_model_config, resolve_model

MODEL = "quire-storyteller"
TEXTS = (
    "Once upon a time there was a fox. The fox saw a fox. The fox ",
    "The old king and the young king and the old king ",
    "Tell me: yes or no? " * 4,
)
OBJECT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}},
    "required": ["n", "s"],
}
FORMS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"regex": r"[a-z ]{5,30}\."},
    {"json": OBJECT},
    {"choice": ["yes sir", "yes madam", "no"]},
)
OWN: dict[str, Any] = {"model": MODEL, "num_speculative_tokens": 3}
NGRAM: dict[str, Any] = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3
}  # fmt: skip
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 6}
SMALL = {"kv_cache_memory": "1300KiB", "max_num_batched_tokens": 24, "max_num_seqs": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "one adapter at once": {"max_loras": 1},
    "few blocks": SMALL,
    "few blocks, suffixes": {**SMALL, "speculative_config": SUFFIX},
    "words of the prompt": {"speculative_config": NGRAM},
    "few blocks, a draft model": {
        **SMALL, "kv_cache_memory": "2600KiB", "speculative_config": OWN
    },
}  # fmt: skip


def _requests(seed: int) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [rng.choice(TEXTS) for _ in range(16)]
    params = [
        SamplingParams(
            max_tokens=rng.choice((12, 40)),
            temperature=rng.choice((0.0, 0.8)),
            seed=place,
            n=rng.choice((1, 1, 2)),
            logprobs=2,
            prompt_logprobs=rng.choice((None, None, 1)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            structured_outputs=StructuredOutputsParams(**form) if form else None,
        )
        for place, form in enumerate(FORMS * 4)
    ]
    return prompts, params


def _numbers(output: RequestOutput) -> Any:
    assert output.error is None
    answers = [(each.token_ids, each.finish_reason, each.logprobs) for each in output.outputs]
    return answers, output.prompt_logprobs


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_combined_with_an_adapter_changes_no_bit(
    make_llm: MakeLLM, tmp_path: Path, variant: str
) -> None:
    spec = declare(read_model_config(resolve_model(MODEL)))
    folders = [
        write_whole_adapter(tmp_path / "whole", spec, strength=0.15),
        write_adapter(tmp_path / "part", spec, strength=0.3),
    ]
    known: list[LoRARequest | None] = [
        None,
        *(LoRARequest(each.name, number, str(each)) for number, each in enumerate(folders, 1)),
    ]
    (prompts, params), rng = _requests(len(variant)), random.Random(variant)
    adapters = [rng.choice(known) for _ in prompts]
    given: dict[str, Any] = {
        "model": MODEL, "skip_tokenizer_init": False, "max_lora_rank": 8, "max_loras": 2,
        "max_model_len": 200, "kv_cache_memory": "16MiB",
    }  # fmt: skip
    alone = make_llm(**given, enable_prefix_caching=False)
    expected = [
        _numbers(alone.generate([prompt], param, use_tqdm=False, lora_request=[adapter])[0])
        for prompt, param, adapter in zip(prompts, params, adapters, strict=True)
    ]
    llm: LLM = make_llm(**{**given, **VARIANTS[variant]})
    for _ in range(2):  # and with what it then has in its prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        assert list(map(_numbers, outputs)) == expected
    assert isinstance(llm.engine, Engine)
    assert (llm.engine.scheduler.stats.num_preemptions > 0) == ("few" in variant)
