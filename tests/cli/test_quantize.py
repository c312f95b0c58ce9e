"""`quire quantize`: what it writes computes as quantizing at load does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main


def _answer(model: str, **options: Any) -> list[tuple[int, float]]:
    with LLM(model, max_model_len=128, num_threads=1, kv_cache_memory="8MiB", **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
        [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token_id, held[token_id].logprob) for token_id, held in steps]


@pytest.mark.slow_except("int8")
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_written_checkpoint_computes_what_quantizing_at_load_computes(
    form: str, tmp_path: Path
) -> None:
    folder = tmp_path / form
    assert main(["quantize", "quire-storyteller", "--to", form, "-o", str(folder)]) == 0
    written = _answer(str(folder))
    assert written == _answer("quire-storyteller", quantization=form)
    assert written != _answer("quire-storyteller")
