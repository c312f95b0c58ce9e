"""A tiny model with made-up weights, and engines around it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from vision_models import GEMMA, LLAVA, qwen_config

from quire.common.kv_formats import KV_FORMATS
from quire.config.engine import EngineConfig
from quire.engine.assembly.builder import build_engine
from quire.engine.loop.engine import Engine

VOCAB_SIZE = 256
DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")
"""Where engines compute: `make gpu-test` asks for a GPU."""

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY_LLAMA))
    return path


@pytest.fixture(scope="session")
def draft_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model, with a smaller vocabulary."""
    path: Path = tmp_path_factory.mktemp("draft") / "config.json"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 200}
    path.write_text(json.dumps({**TINY_LLAMA, **sizes}))
    return path


@pytest.fixture(scope="session")
def eagle_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head for the tiny model."""
    path: Path = tmp_path_factory.mktemp("eagle") / "config.json"
    own = {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    path.write_text(json.dumps(TINY_LLAMA | own))
    return path


@pytest.fixture(scope="session")
def eagle3_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head for the tiny model, with fewer tokens."""
    path: Path = tmp_path_factory.mktemp("eagle3") / "config.json"
    own = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    path.write_text(json.dumps(TINY_LLAMA | own | {"draft_vocab_size": 128}))
    return path


@pytest.fixture(scope="session")
def qwen_vl_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny model whose images keep their own sizes."""
    path: Path = tmp_path_factory.mktemp("qwen_vl") / "config.json"
    path.write_text(json.dumps(qwen_config("Qwen2_5_VL")))
    return path


@pytest.fixture(scope="session")
def llava_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny model that reads images."""
    path: Path = tmp_path_factory.mktemp("llava") / "config.json"
    path.write_text(json.dumps(LLAVA))
    return path


@pytest.fixture(scope="session")
def gemma3_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny model whose tokens in an image's places see one another both ways."""
    path: Path = tmp_path_factory.mktemp("gemma3") / "config.json"
    path.write_text(json.dumps(GEMMA))
    return path


def _num_draft_rows(speculative: Mapping[str, Any] | None) -> int:
    """Rows of as many numbers as the tiny model's that a draft model, or a head, keeps of a
    token, states of the target included."""
    if speculative is None:
        return 0
    num_state_rows: int = TINY_LLAMA["hidden_size"] // TINY_LLAMA["head_dim"]  # type: ignore[operator]
    if speculative.get("method") == "mtp":
        return 2 * num_state_rows  # its latents are as long as its states
    if "model" not in speculative:
        return 0
    config = json.loads(Path(speculative["model"]).read_text())
    num_rows = int(config["num_hidden_layers"] * config["num_key_value_heads"] * 2)
    keeps_states = speculative.get("method", "draft_model") not in ("draft_model", "auto")
    return num_rows + (num_state_rows if keeps_states else 0)


@pytest.fixture
def make_engine(tiny_config: Path) -> Iterator[MakeEngine]:
    """Builds engines around the tiny model, or another one whose KV cache is alike; `num_blocks`
    sizes the pool exactly."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        block_size = options.setdefault("block_size", 16)
        dtype, stored = (
            options.setdefault("dtype", "float32"),
            options.get("kv_cache_dtype", "auto"),
        )
        row_bytes = KV_FORMATS[dtype if stored == "auto" else stored].row_bytes(16)
        num_blocks = options.pop("num_blocks", 256 // block_size * 4)
        token_bytes = (8 + _num_draft_rows(options.get("speculative_config"))) * row_bytes
        options.setdefault("kv_cache_memory", num_blocks * block_size * token_bytes)
        options.setdefault("num_threads", 1)
        options.setdefault("max_num_seqs", 16)
        if DEVICE != "cpu":
            options.setdefault("device", DEVICE)
        model = str(options.pop("model", tiny_config))
        engine = build_engine(EngineConfig(model=model, load_format="dummy", **options))
        assert engine.plan.limits.num_blocks == num_blocks
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
