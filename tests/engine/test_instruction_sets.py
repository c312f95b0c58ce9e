"""The shipped model on every instruction set that this machine has: the reference's greedy text,
within rounding."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from quire import LLM, SamplingParams
from quire.kernels import cpu

PROMPT = "Once upon a time there was a"
NUM_TOKENS = 24

# Largest difference of a log-probability from the reference's: rounding of float32 sums in another
# order, through all layers. Weights and inputs of int8 round at the same places in both, but where
# an input falls just beside such a place, it takes the next integer, and every later token sees
# that one's keys (up to 0.084 measured; 1e-6 before that).
TOLERANCE = {None: 2e-4, "int8": 1.5e-1}


class _Step(NamedTuple):
    token_id: int
    logprob: float
    margin: float
    """By which the best token's log-probability exceeds the next one's."""


def _greedy(kernels: str, quantization: str | None) -> list[_Step]:
    options = {
        "kernels": kernels,
        "quantization": quantization,
        "dtype": "float32",
        "kv_cache_memory": "8MiB",
    }
    with LLM("quire-storyteller", max_model_len=128, num_threads=1, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.token_ids) == NUM_TOKENS
    steps = []
    for token_id, held in zip(completion.token_ids, completion.logprobs, strict=True):
        best, second = sorted((each.logprob for each in held.values()), reverse=True)[:2]
        steps.append(_Step(token_id, held[token_id].logprob, best - second))
    return steps


@cache
def _reference(quantization: str | None) -> list[_Step]:
    return _greedy("reference", quantization)


@pytest.mark.slow_combinations
@pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="the native extension is not built")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("isa", cpu.supported_isas() if cpu.IMPORT_ERROR is None else [])
def test_greedy_text_is_the_references(isa: str, quantization: str | None) -> None:
    with cpu.using(isa=isa):
        steps = _greedy("cpu", quantization)
    tolerance = TOLERANCE[quantization]
    num_compared = 0
    for got, wanted in zip(steps, _reference(quantization), strict=True):
        if got.token_id != wanted.token_id:
            assert wanted.margin < 2 * tolerance, f"token {num_compared}: {got} instead of {wanted}"
            break
        assert abs(got.logprob - wanted.logprob) < tolerance, (
            f"token {num_compared}: {got}, expected {wanted}"
        )
        num_compared += 1
    assert num_compared >= 8
