"""Engines of one model in several processes, and what they answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from engines import run_all

from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.engine.assembly.builder import build_engine
from quire.engine.loop.engine import Engine
from quire.engine.ranks import RANK_COMMAND
from quire.executor.ranks import RanksExecutor
from quire.kernels import cpu
from quire.parallel.fork_server import SharedServer, can_fork

needs_ranks = pytest.mark.skipif(
    cpu.IMPORT_ERROR is not None or not hasattr(os, "memfd_create"),
    reason="ranks need the native module and memory without a name",
)
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260, "max_position_embeddings": 256,
}  # fmt: skip
SIZES_OF_GROUPS = ("tensor_parallel_size", "pipeline_parallel_size")
REQUESTS: Mapping[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([5, 6, 7, 8], {"temperature": 0.0, "logprobs": 3}),
    "drawn": (list(range(9, 60)), {"seed": 3, "logprobs": 2}),
    "filtered": (list(range(9, 43)), {"seed": 4, "temperature": 0.7, "top_p": 0.8, "top_k": 30}),
    "scored": (list(range(80, 91)), {"temperature": 0.0, "prompt_logprobs": 2}),
    "several": (list(range(30, 47)), {"seed": 5, "n": 3}),
}


def write_model(folder: Path, name: str, **sizes: int) -> Path:
    (folder / "config.json").write_text(json.dumps(SIZES | {"architectures": [name]} | sizes))
    return folder


@lru_cache
def hold_fork_server() -> SharedServer | None:
    """Have one fork server for all engines of this process, and wait until it is there: each rank
    would import torch anew, and the tests start hundreds."""
    if not can_fork():
        return None
    server = SharedServer(RANK_COMMAND)
    assert server.wait_ready(120.0)
    return server


def build(folder: Path, *, holds: bool = True, **options: Any) -> Engine:
    """`holds`: ranks are forked from the first one on."""
    if holds and any(options.get(name, 1) > 1 for name in SIZES_OF_GROUPS):
        hold_fork_server()
    given = {"kv_cache_memory": "4MiB", "num_threads": 1, "max_num_batched_tokens": 32} | options
    return build_engine(
        EngineConfig.from_options(
            str(folder), {"load_format": "dummy", "skip_tokenizer_init": True} | given
        )
    )


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[Engine]:
    engine = build(folder, **options)
    try:
        yield engine
    finally:
        engine.close()


def answers(engine: Engine, after_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    for name, (prompt, params) in REQUESTS.items():
        engine.add_request(
            name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=24, **params)
        )
    outputs = run_all(engine, after_step)
    return {
        name: (each.error, each.prompt_logprobs, [(o.token_ids, o.logprobs) for o in each.outputs])
        for name, each in outputs.items()
    }


def ranks_of(engine: Engine) -> RanksExecutor:
    executor = engine.executor
    assert isinstance(executor, RanksExecutor)
    return executor


OLMOE = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
