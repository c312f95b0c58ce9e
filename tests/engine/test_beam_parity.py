"""Beam search finds the very beams that Transformers' `generate(num_beams=...)` finds,
with their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.core.beam_params import BeamSearchParams
from quire.engine.front.prompts import Prompt
from quire.llm import LLM

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 13, 17, 2, 30], [7], [11, 12] * 9]
MAX_TOKENS = 12
VOCAB_SIZE = 40
EOS = [3, 8]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random Llama whose distributions are peaked enough for beams to differ in length."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=128,
        initializer_range=0.35,
        eos_token_id=EOS,
        bos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny-beams")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def llm(tiny: tuple[Path, Any]) -> Any:
    options = {
        "skip_tokenizer_init": True,
        "kv_cache_memory": "2MiB",
        "num_threads": 1,
        "max_num_seqs": 32,
        "dtype": "float32",
    }
    with LLM(str(tiny[0]), **options) as llm:
        yield llm


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("beam_width", [2, 3, 5])
def test_beams_equal_transformers(
    beam_width: int, length_penalty: float, early_stopping: Any, tiny: tuple[Path, Any], llm: LLM
) -> None:
    params = BeamSearchParams(
        beam_width=beam_width,
        max_tokens=MAX_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    prompts: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = _transformers_beams(tiny[1], prompt, params)
        assert [each.token_ids for each in output.sequences] == [ids for ids, _ in expected]
        for mine, (_, score) in zip(output.sequences, expected, strict=True):
            assert mine.score == pytest.approx(score, abs=1e-4)


def _transformers_beams(
    model: Any, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    beams = [_unpadded(ids.tolist()[len(prompt) :]) for ids in found.sequences]
    return list(zip(beams, found.sequences_scores.tolist(), strict=True))


def _unpadded(token_ids: list[int]) -> list[int]:
    """Up to and including the first end-of-sequence token; what follows is padding."""
    ends = [place for place, token in enumerate(token_ids) if token in EOS]
    return token_ids[: ends[0] + 1] if ends else token_ids
