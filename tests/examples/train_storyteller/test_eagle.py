"""The draft head for the storyteller: what torch learns, the engine drafts with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.train_storyteller import eagle
from examples.train_storyteller.optimizer import StoryOptimizer
from examples.train_storyteller.sample import load_exported
from quire import LLM, SamplingParams, TokensPrompt
from quire.config.speculation import SpeculationConfig
from quire.core.drafts import MODELLED
from quire.core.speculation.methods import speculator_of
from quire.spec.depth import DraftDepth

MODEL = Path("quire/assets/quire-storyteller")
NUM_DRAFTED, NUM_TOKENS, NUM_STEPS = 3, 72, 90


def _accepted(folder: Path, prompt: list[int]) -> list[float]:
    """Of all drafts for one greedy answer, how many were right up to each place."""
    settings = {"method": "eagle", "model": str(folder), "num_speculative_tokens": NUM_DRAFTED}
    with LLM(str(MODEL), kv_cache_memory="8MiB", num_threads=1, speculative_config=settings) as llm:
        worker = llm.engine.executor.worker  # type: ignore[attr-defined]
        worker.companions.of(MODELLED).depth = DraftDepth(is_adaptive=False)
        scheduler = llm.engine.scheduler
        scheduler.look_ahead = speculator_of(SpeculationConfig.from_mapping(settings), None)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
        stats = scheduler.stats
        rights = [*stats.num_right_by_place, *[0] * NUM_DRAFTED][:NUM_DRAFTED]
        return [right / stats.num_runs for right in rights]


@pytest.mark.slow
def test_a_head_that_knows_a_text_by_heart_drafts_it(tmp_path: Path) -> None:
    teacher = load_exported(MODEL)
    teacher.requires_grad_(requires_grad=False)
    with LLM(str(MODEL), kv_cache_memory="8MiB", num_threads=1) as llm:
        prompt = list(llm.get_tokenizer().encode("Once upon a time there was a"))
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        [answer] = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
    ids = torch.tensor([[*prompt, *answer.outputs[0].token_ids]])
    torch.manual_seed(0)
    head = eagle.Head(teacher.shape)
    eagle.write(head.eval(), teacher.shape, tmp_path / "untrained")
    optimizer, is_text = StoryOptimizer(head), torch.ones_like(ids, dtype=torch.bool)
    for step in range(NUM_STEPS):
        eagle.loss(head, teacher, ids, is_text).backward()  # type: ignore[no-untyped-call]
        optimizer.step(1.0 - step / NUM_STEPS)
    eagle.write(head, teacher.shape, tmp_path / "trained")
    at_most, sure = eagle.bounds(teacher, head, ids.tolist(), 1.0)
    assert 0.0 < sure < at_most <= 1.0
    untrained, trained = (_accepted(tmp_path / name, prompt) for name in ("untrained", "trained"))
    assert untrained[0] < 0.2
    assert trained[0] > 0.7 and trained[1] > 0.4


def test_the_folder_has_the_published_layout(tmp_path: Path) -> None:
    from safetensors import safe_open

    shape = load_exported(MODEL).shape
    eagle.write(eagle.Head(shape), shape, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["bias"]) == (1, True)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight"} <= names
    assert "layers.0.post_attention_layernorm.weight" in names
    assert not any("embed" in name or "input_layernorm" in name for name in names)
    assert (tmp_path / "model.safetensors").stat().st_size < 3 << 20
