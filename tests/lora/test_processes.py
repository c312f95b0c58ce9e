"""Adapters in several processes: the bits of one process, also where a process is lost."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from adapters import (
    ALL,
    MOE,
    TINY,
    MakeLLM,
    write_adapter,
    write_model,
    write_whole_adapter,
)
from ranks import hold_fork_server, needs_ranks, ranks_of
from safetensors.torch import load_file, save_file
from torch import arange, ones

from quire import LoRARequest, SamplingParams, TokensPrompt
from quire.kernels.lora import LoraPart, LoraWeight
from quire.lora.cutting import cut_outputs
from quire.models.declaration import DecoderSpec


@pytest.fixture(scope="module")
def fork_server() -> None:
    hold_fork_server()


PROMPTS = [list(range(3, 3 + count)) for count in (5, 70, 12, 33)]


def test_a_cut_has_the_rows_of_its_outputs() -> None:
    up = arange(12.0).view(6, 2)
    weight = LoraWeight(ones(3, 4), ones(3), (LoraPart(0, 0, up[:4]), LoraPart(6, 1, up[4:])), 8)
    cut = cut_outputs(weight, [range(1, 3), range(5, 8)])
    assert cut is not None and (cut.num_outputs, len(cut.down)) == (5, 3)
    first, second = cut.parts
    assert (first.first_output, first.first_rank, first.up.tolist()) == (0, 0, up[1:3].tolist())
    assert (second.first_output, second.first_rank, second.up.tolist()) == (3, 1, up[4:].tolist())


def test_a_cut_has_the_products_that_its_outputs_need() -> None:
    down, scales, up = arange(12.0).view(4, 3), arange(4.0), arange(8.0).view(4, 2)
    parts = (LoraPart(0, 0, up[:2, :1]), LoraPart(2, 2, up[:2]), LoraPart(4, 2, up[2:]))
    weight = LoraWeight(down, scales, parts, 8)
    cut = cut_outputs(weight, [range(3, 6)])
    assert cut is not None and cut.num_outputs == 3
    assert cut.down.tolist() == down[2:].tolist() and cut.scales.tolist() == [2.0, 3.0]
    assert [(part.first_output, part.first_rank) for part in cut.parts] == [(0, 0), (1, 0)]
    assert cut_outputs(weight, [range(6, 8)]) is None


def answers(llm: Any, adapters: list[LoRARequest | None]) -> list[Any]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=each) for each in PROMPTS]
    found = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]


@needs_ranks
@pytest.mark.usefixtures("fork_server")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sizes", "backend"),
    [
        ({}, (2, 2), "sockets"),
        ({"dtype": "bfloat16"}, (1, 2), "mp"),
        ({"quantization": "int8"}, (3, 1), "mp"),
    ],
    ids=str,
)
def test_divided_models_serve_adapters_with_the_same_bits(
    make_llm: MakeLLM,
    tmp_path: Path,
    spec: DecoderSpec,
    options: dict[str, Any],
    sizes: tuple[int, int],
    backend: str,
) -> None:
    given: dict[str, Any] = {"max_num_batched_tokens": 96, "max_loras": 2} | options
    folders = [
        write_adapter(tmp_path / "a", spec, seed=1),
        write_adapter(tmp_path / "b", spec, seed=2, targets=("k_proj", "up_proj")),
        write_adapter(tmp_path / "c", spec, seed=3, targets=ALL[3:], rank=5),
    ]
    named = [LoRARequest(each.name, place, str(each)) for place, each in enumerate(folders, 1)]
    chosen = [named[0], named[1], None, named[2]]
    alone = make_llm(**given)
    expected, turned = answers(alone, chosen), answers(alone, chosen[::-1])
    assert turned != expected
    llm = make_llm(
        **given,
        tensor_parallel_size=sizes[0],
        pipeline_parallel_size=sizes[1],
        distributed_executor_backend=backend,
    )
    assert answers(llm, chosen) == expected
    group = ranks_of(llm.engine).group
    os.kill(group.pids[-1], signal.SIGKILL)  # the new one knows no adapter
    assert answers(llm, chosen[::-1]) == turned
    assert answers(llm, chosen) == expected


@needs_ranks
@pytest.mark.usefixtures("fork_server")
@pytest.mark.slow
def test_new_processes_load_an_adapter_from_where_its_files_are_by_then(
    make_llm: MakeLLM, tmp_path: Path, spec: DecoderSpec
) -> None:
    """It stays in the first process's memory, while the copy of its files goes with the last who
    needs it; the next one gets another."""
    folder = write_adapter(tmp_path / "a", spec, seed=1)
    chosen: list[LoRARequest | None] = [LoRARequest("a", 1, str(folder))] * len(PROMPTS)
    llm = make_llm(max_num_batched_tokens=96, tensor_parallel_size=2)
    expected = answers(llm, chosen)
    store = llm.engine.adapters._store
    assert store is not None
    store.forget(folder)
    answers(llm, [None] * len(PROMPTS))  # in the rows of those who had it
    gc.collect()
    assert not [each for each in store._root.iterdir() if each.is_dir()]  # beside its lock
    group = ranks_of(llm.engine).group
    os.kill(group.pids[0], signal.SIGKILL)
    assert answers(llm, chosen) == expected
    assert group.num_starts == 2


@needs_ranks
@pytest.mark.usefixtures("fork_server")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3, "dtype": "bfloat16"},
        {"tensor_parallel_size": 2, "quantization": "int8", "max_num_batched_tokens": 8},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"tensor_parallel_size": 3, "enable_expert_parallel": True, "dtype": "bfloat16"},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=str,
)
def test_divided_experts_take_adapters_with_the_same_bits(
    make_llm: MakeLLM, tmp_path: Path, options: dict[str, Any]
) -> None:
    """One adapter changes everything, one the last expert of the first layer alone, which one of
    several ranks has, and one the outputs of some experts but not their gates."""
    model = tmp_path / "model"
    spec = write_model(model, {**MOE, "moe_intermediate_size": 48})
    whole, one, some = (
        write_whole_adapter(tmp_path / f"{rank}", spec, rank=rank, seed=rank) for rank in (2, 4, 5)
    )
    _keep(one, r"layers\.0\..*experts\.5\.")
    _keep(some, r"experts\.[13]\.down")
    named = [
        LoRARequest(each.name, place, str(each)) for place, each in enumerate((whole, one, some), 1)
    ]
    given = {"model": str(model), "lora_experts": True, "max_loras": 3} | options
    parallel = {name: given.pop(name) for name in list(given) if "parallel" in name}
    alone = make_llm(**given)
    chosen = [named[0], named[1], None, named[2]]
    expected, turned = answers(alone, chosen), answers(alone, chosen[::-1])
    plain = answers(alone, [None] * len(chosen))
    assert [each != other for each, other in zip(expected, plain, strict=True)] == [
        True, True, False, True,
    ]  # fmt: skip
    llm = make_llm(**given, **parallel)
    assert answers(llm, chosen) == expected
    assert answers(llm, chosen[::-1]) == turned


def _keep(folder: Path, pattern: str) -> None:
    """Leave out the tensors of an adapter whose names do not match."""
    path = folder / "adapter_model.safetensors"
    kept = {name: each for name, each in load_file(path).items() if re.search(pattern, name)}
    assert kept
    save_file(kept, path)
    config = json.loads((folder / "adapter_config.json").read_text())
    names = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in kept}
    config["target_modules"] = sorted(names)
    (folder / "adapter_config.json").write_text(json.dumps(config))


@needs_ranks
@pytest.mark.usefixtures("fork_server")
@pytest.mark.slow
def test_divided_models_serve_adapters_of_what_else_there_is_with_the_same_bits(
    make_llm: MakeLLM, tmp_path: Path
) -> None:
    """Also of embeddings, which ranks gather, of the head, whose logits they gather, and biases."""
    config = {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    model = tmp_path / "model"
    spec = write_model(model, config)
    folders = [write_whole_adapter(tmp_path / f"{n}", spec, rank=n + 3, seed=n) for n in range(2)]
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    name = "base_model.model.model.embed_tokens.base_layer.weight"  # as PEFT stores it besides
    stored = folders[0] / "adapter_model.safetensors"
    save_file(load_file(stored) | {name: table}, stored)
    named = [LoRARequest(each.name, place, str(each)) for place, each in enumerate(folders, 1)]
    chosen = [named[0], named[1], None, named[0]]
    given: dict[str, Any] = {"model": str(model), "max_num_batched_tokens": 96}
    expected = answers(make_llm(**given), chosen)
    llm = make_llm(**given, pipeline_parallel_size=2)
    assert answers(llm, chosen) == expected
    llm.close()
    llm = make_llm(**given, tensor_parallel_size=2)
    assert answers(llm, chosen) == expected
    other = shutil.copytree(folders[0], tmp_path / "other")
    save_file(load_file(stored) | {name: table + 1}, other / stored.name)
    params = SamplingParams(max_tokens=2)
    prompt = TokensPrompt(prompt_token_ids=PROMPTS[0])
    third = LoRARequest("other", 3, str(other))
    [refused] = llm.generate(prompt, params, lora_request=third, use_tqdm=False)
    assert "another model.embed_tokens" in str(refused.error)
    [answered] = llm.generate(prompt, params, lora_request=named[1], use_tqdm=False)
    assert answered.error is None
