"""What a start loads: not the features that nobody asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SIMPLE_RUN = """
import sys
from quire import LLM, SamplingParams
with LLM("quire-storyteller", kv_cache_memory="4MiB") as llm:
    llm.generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)
print(" ".join(sorted(name for name in sys.modules if name.partition(".")[0] == "quire")))
"""
FEATURES = {
    "adapters": ("lora.config", "lora.layout", "lora.store", "lora.table", "lora.weights"),
    "chats": ("text.chat", "text.reasoning", "text.tools", "text.harmony", "text.pretrained"),
    "decisions": ("engine.decisions.answers", "engine.decisions.prompts"),
    "drafts": ("spec", "models.draft_heads", "core.speculation.lookup", "core.speculation.mixture"),
    "experts out of memory": ("weights.expert_store", "core.scheduler.experts", "worker.experts"),
    "forms of answers": ("grammar.judge", "grammar.trial", "grammar.backend", "grammar.lark"),
    "images": ("media", "models.image_places", "models.image_processing", "nn.vision"),
    "inspection": ("engine.loop.inspection", "engine.loop.recorder"),
    "other models": ("models.deepseek", "models.qwen3", "models.bert", "models.experts"),
    "pooling": ("engine.pooling.decision", "engine.pooling.requests", "weights.late_interaction"),
    "programs": ("server", "router", "cli", "ray", "sim", "bench", "engine.process"),
    "quantized checkpoints": ("quant.storage", "quant.unpacking", "quant.gguf", "weights.gguf"),
    "several processes": ("parallel", "executor.ranks", "engine.ranks.launch", "engine.replicas"),
    "tiers": ("tiers", "core.scheduler.tiers", "engine.assembly.tiers"),
    "transfers": ("transfer", "core.scheduler.transfers", "engine.assembly.transfers"),
}
"""Modules and packages by what they are for."""


@pytest.mark.slow
def test_a_simple_run_loads_no_feature_that_it_does_not_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIMPLE_RUN], capture_output=True, text=True, timeout=250, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = done.stdout.splitlines()[-1].split()
    needless = {
        feature: [
            name
            for name in loaded
            if any(f"{name}.".startswith(f"quire.{module}.") for module in modules)
        ]
        for feature, modules in FEATURES.items()
    }
    assert {feature: names for feature, names in needless.items() if names} == {}


def test_what_is_not_to_be_loaded_is_there() -> None:
    """A module that has another name by now would not be missed."""
    for module in (name for modules in FEATURES.values() for name in modules):
        path = ROOT / "quire" / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
