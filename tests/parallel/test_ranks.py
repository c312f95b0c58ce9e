"""Ranks as processes: the answers of one process, whatever is done to them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import run_all

from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.engine.assembly.builder import build_engine
from quire.engine.loop.engine import Engine
from quire.errors import ConfigError
from quire.executor.ranks import RanksExecutor
from quire.kernels import cpu

pytestmark = pytest.mark.skipif(
    cpu.IMPORT_ERROR is not None or not hasattr(os, "memfd_create"),
    reason="ranks need the native module and memory without a name",
)
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260, "max_position_embeddings": 256,
}  # fmt: skip
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


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[Engine]:
    given = {"kv_cache_memory": "4MiB", "num_threads": 1, "max_num_batched_tokens": 32} | options
    engine = build_engine(
        EngineConfig.from_options(
            str(folder), {"load_format": "dummy", "skip_tokenizer_init": True} | given
        )
    )
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"dtype": "float32", "kv_cache_memory": "64KiB"},
        {"dtype": "bfloat16", "speculative_config": {"method": "suffix"}},
    ],
    ids=str,
)
def test_any_number_of_ranks_gives_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder, **options) as engine:
        expected = answers(engine)
        num_preempted = engine.scheduler.stats.num_preemptions
    assert all(error is None for error, *_ in expected.values())
    assert (num_preempted > 0) == ("kv_cache_memory" in options)
    for num_ranks in (2, 3):
        with engine_of(folder, tensor_parallel_size=num_ranks, **options) as engine:
            assert answers(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Gemma2ForCausalLM", {"sliding_window": 16}),
        ("Olmo2ForCausalLM", {}),
        ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_models_of_other_kinds_give_the_same_bits(
    tmp_path: Path, name: str, sizes: dict[str, int]
) -> None:
    folder = write_model(tmp_path, name, **sizes)
    with engine_of(folder, dtype="bfloat16") as engine:
        expected = answers(engine)
    with engine_of(folder, dtype="bfloat16", tensor_parallel_size=2) as engine:
        assert answers(engine) == expected


OLMOE = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("OlmoeForCausalLM", OLMOE, {"quantization": "int8"}),
        ("OlmoeForCausalLM", OLMOE, {"dtype": "float32", "kv_cache_memory": "64KiB"}),
        ("DeepseekV3ForCausalLM", LATENT, {"dtype": "bfloat16"}),
        ("DeepseekV3ForCausalLM", LATENT, {"quantization": "int4"}),
    ],
    ids=str,
)
def test_ranks_with_experts_of_their_own_are_replaced_and_give_the_bits_of_one_process(
    tmp_path: Path, name: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, name, **sizes)
    with engine_of(folder, **options) as engine:
        expected = answers(engine)
    sizes_of_group = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with engine_of(folder, **sizes_of_group, **options) as engine:
        group, num_steps = ranks_of(engine).group, 0

        def strike() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5:
                os.kill(group.pids[0], signal.SIGKILL)

        assert answers(engine, strike) == expected
        assert num_steps > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("LlamaForCausalLM", {}, {"dtype": "float32"}),
        ("LlamaForCausalLM", {}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        (
            "LlamaForCausalLM",
            {},
            {"quantization": "int8", "speculative_config": {"method": "suffix"}},
        ),
        ("LlamaForCausalLM", {}, {"dtype": "float32", "kv_cache_memory": "64KiB"}),
        (
            "OlmoeForCausalLM",
            {"num_experts": 4, "num_experts_per_tok": 2},
            {"quantization": "int4"},
        ),
        ("DeepseekV3ForCausalLM", LATENT, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_several_engines_give_the_bits_of_one(
    tmp_path: Path, name: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, name, **sizes)
    with engine_of(folder, **options) as engine:
        expected = answers(engine)
    with engine_of(folder, data_parallel_size=2, **options) as engine:
        assert answers(engine) == expected


@pytest.mark.slow
def test_several_engines_of_several_ranks_give_the_bits_of_one_process(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder, dtype="bfloat16") as engine:
        expected = answers(engine)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    with engine_of(folder, dtype="bfloat16", **sizes) as engine:
        assert answers(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_is_replaced_and_every_request_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder) as engine:
        expected = answers(engine)
    options = {"tensor_parallel_size": 3, "distributed_timeout_seconds": 1.0}
    with engine_of(folder, **options) as engine:
        group, num_steps = ranks_of(engine).group, 0
        lost: list[int] = []

        def strike() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps in (3, 9):
                lost.extend(group.pids)
                os.kill(group.pids[num_steps // 9], number)

        began = time.monotonic()
        assert answers(engine, strike) == expected
        assert time.monotonic() - began < 60.0
        assert len(set(lost)) == 4 and not set(group.pids) & set(lost)
        assert not any(_lives(pid) for pid in lost)


@pytest.mark.slow
def test_a_rank_that_dies_in_the_middle_of_a_step_is_noticed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM", num_hidden_layers=4)
    with engine_of(folder) as engine:
        expected = answers(engine)
    with engine_of(folder, tensor_parallel_size=2) as engine:
        group = ranks_of(engine).group
        for delay in (0.01, 0.03, 0.05):
            threading.Timer(delay, os.kill, (group.pids[0], signal.SIGKILL)).start()
            assert answers(engine) == expected
            time.sleep(0.1)


@pytest.mark.slow
def test_nothing_of_a_group_is_left_behind(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder, tensor_parallel_size=3) as engine:
        pids = ranks_of(engine).group.pids
        assert len(pids) == 2 and all(map(_lives, pids))
    assert not any(map(_lives, pids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 65}, "at most 64"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, "enable_lora=True is not available"),
        ({"tensor_parallel_size": 2, "kernels": "reference"}, "kernels='reference' is not avail"),
        ({"tensor_parallel_size": 2, "weights_cache": "/x"}, "weights_cache='/x' is not available"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            "distributed_executor_backend='uni' is one process",
        ),
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds=0 must be"),
        ({"enable_expert_parallel": True}, "tensor_parallel_size=1 is one"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "LlamaForCausalLM has no experts",
        ),
    ],
)
def test_what_ranks_cannot_do_is_said_before_anything_starts(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ConfigError, match=message), engine_of(folder, **options):
        pass


def test_experts_that_cannot_be_divided_evenly_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "OlmoeForCausalLM", **OLMOE)
    message = r"4 experts cannot be divided among tensor_parallel_size=3 .*\(2, 4\)"
    options = {"tensor_parallel_size": 3, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match=message), engine_of(folder, **options):
        pass


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
