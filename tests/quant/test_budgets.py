"""How far each form of the weights may be from bfloat16: budgets of KL divergence and perplexity,
on the shipped model.

A model of five million parameters has no room to spare, so these are larger than those of models of
everyday size. A budget is some 1.5 times what was measured when it was set; some divergence must be
there, so that a form that is not used fails.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf_models import store_gguf
from quantized_checkpoints import (
    Pack,
    awq,
    byte_integers,
    compressed_tensors,
    fp8,
    gptq,
    packed_integers,
    store_model,
)
from torch import Tensor

from quire import LLM, SamplingParams
from quire.engine.assembly.quantization import quantize_model
from quire.quant.writer import Recipe
from quire.sampling.sampler import Sampler
from quire.weights.folder import resolve_model

MODEL = "quire-storyteller"
STORIES = [
    "Once upon a time there was a little fox who lived under the roots of an old oak. Every "
    "morning she went down to the "
    "river to look at the fish, and every morning the fish laughed and swam away. One day "
    "the fox met a hare who was crying. "
    '"Why do you cry?" asked the fox. "I have lost my way," said the hare, "and the night is '
    'coming." So the fox took the '
    "hare home to her den, and they ate bread and berries together, and from that day they "
    "were friends.",
    "There was once a king who had three sons, and when he grew old he called them to his "
    "bed. He who brings me the golden "
    "bird from the top of the mountain, said the king, shall have my crown. The eldest rode "
    "away on a black horse, and the "
    "second on a white one, but the youngest had no horse at all, and went on foot. In the "
    "forest he met an old woman with a "
    "bundle of sticks, and he carried it for her all the way to her house.",
]


class Budget(NamedTuple):
    """The largest mean KL divergence from bfloat16, in nats a token,
    and the largest relative change of perplexity."""

    divergence: float
    change: float


class Reading(NamedTuple):
    """Log-probabilities of the stories."""

    rows: Tensor
    """float64 [tokens, vocabulary]"""
    perplexity: float


def read_stories(model: str, **options: Any) -> Reading:
    """One story after the other; the logits are taken where they are scored:
    a million `Logprob` objects take seconds."""
    logits: list[Tensor] = []
    score = Sampler.prompt_logprobs

    def keep(sampler: Sampler, rows: Tensor, *rest: Any) -> Any:
        logits.append(rows.double())
        return score(sampler, rows, *rest)

    with (
        LLM(model, kv_cache_memory="8MiB", num_threads=1, **options) as llm,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(Sampler, "prompt_logprobs", keep)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = [
            output for story in STORIES for output in llm.generate(story, params, use_tqdm=False)
        ]
    ids = torch.tensor(
        [token_id for output in outputs for token_id in (output.prompt_token_ids or ())[1:]]
    )
    rows = torch.cat(logits).log_softmax(1)
    return Reading(rows, math.exp(-float(rows.gather(1, ids[:, None]).mean())))


@pytest.fixture(scope="module")
def original() -> Reading:
    return read_stories(MODEL)


def _check(found: Reading, original: Reading, budget: Budget) -> None:
    divergence = float((original.rows.exp() * (original.rows - found.rows)).sum(1).mean())
    change = found.perplexity / original.perplexity - 1
    assert budget.divergence / 20 < divergence < budget.divergence, (divergence, change)
    assert abs(change) < budget.change, (divergence, change)


AT_LOAD = {"int8": Budget(0.008, 0.02), "int4": Budget(0.2, 0.12)}


@pytest.mark.parametrize("form", AT_LOAD)
def test_quantized_at_load(form: str, original: Reading) -> None:
    _check(read_stories(MODEL, quantization=form), original, AT_LOAD[form])


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


STORED: dict[str, tuple[Pack, dict[str, Any], Budget]] = {
    "gptq": (gptq(4, 64), GPTQ, Budget(0.2, 0.12)),
    "awq": (awq(64), AWQ, Budget(0.2, 0.12)),
    "gptq 8 bits": (gptq(8, 64), GPTQ | {"bits": 8}, Budget(0.004, 0.02)),
    "w4a16": (
        packed_integers(4, 64, is_symmetric=False),
        compressed_tensors(
            "pack-quantized",
            num_bits=4,
            type="int",
            symmetric=False,
            strategy="group",
            group_size=64,
            dynamic=False,
        ),
        Budget(0.2, 0.12),
    ),
    "fp8": (
        fp8("weight_scale", is_per_output=True),
        compressed_tensors(
            "float-quantized",
            num_bits=8,
            type="float",
            symmetric=True,
            strategy="channel",
            dynamic=False,
        ),
        Budget(0.02, 0.03),
    ),
}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
STORED["w8a8"] = (
    byte_integers(),
    compressed_tensors(
        "int-quantized", **INT8, activations=INT8 | {"strategy": "token", "dynamic": True}
    ),
    Budget(0.006, 0.02),
)


@pytest.mark.slow_except("gptq")
@pytest.mark.parametrize("form", STORED)
def test_stored_in_a_public_format(form: str, original: Reading, tmp_path: Path) -> None:
    pack, config, budget = STORED[form]
    folder = store_model(tmp_path / "stored", resolve_model(MODEL), pack, config)
    _check(read_stories(str(folder)), original, budget)


GGUF = {
    "Q8_0": ("Q8_0", Budget(0.0015, 0.02)),
    "Q6_K": ("Q6_K", Budget(0.008, 0.02)),
    "Q5_K": ("Q6_K", Budget(0.025, 0.03)),
    "Q4_K": ("Q6_K", Budget(0.08, 0.08)),
    "Q4_0": ("Q6_K", Budget(0.12, 0.1)),
}
"""By the encoding of the projections: that of the tied head, as llama.cpp chooses it,
and the budget."""


@pytest.mark.slow_except("Q4_K")
@pytest.mark.parametrize("form", GGUF)
def test_stored_as_gguf(form: str, original: Reading, tmp_path: Path) -> None:
    head, budget = GGUF[form]
    folder = store_gguf(tmp_path / "stored", resolve_model(MODEL), form, head)
    _check(read_stories(str(folder)), original, budget)


def test_written_by_quantize_with_floating_point_activations(
    original: Reading, tmp_path: Path
) -> None:
    quantize_model(MODEL, Recipe("int4", is_weight_only=True, keeps_head=True), tmp_path / "w4a16")
    _check(read_stories(str(tmp_path / "w4a16")), original, Budget(0.2, 0.12))


CACHES = {"int8": Budget(0.001, 0.01), "fp8": Budget(0.01, 0.02)}


@pytest.mark.parametrize("form", CACHES)
def test_a_small_kv_cache(form: str, original: Reading) -> None:
    """In pieces of 16 tokens, so that most tokens read what was stored."""
    pieces: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 2}
    _check(read_stories(MODEL, kv_cache_dtype=form, **pieces), original, CACHES[form])
