"""A tiny model, and engines around it that serve adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import TINY, MakeLLM, write_model

from quire.llm import LLM
from quire.models.declaration import DecoderSpec
from quire.models.registry import declare


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lora") / "model"
    write_model(folder, TINY)
    return folder


@pytest.fixture(scope="session")
def spec() -> DecoderSpec:
    return declare(TINY)


@pytest.fixture
def make_llm(model: Path) -> Iterator[MakeLLM]:
    """An `LLM` of the tiny model that serves adapters; `options` are its options."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        given: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "kv_cache_memory": "1MiB",
            "enable_lora": True,
            "max_lora_rank": 256,
            "dtype": "float32",
            "num_threads": 1,
        }
        given |= options
        if not given["enable_lora"]:
            del given["max_lora_rank"]
        made.append(LLM(**given))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
