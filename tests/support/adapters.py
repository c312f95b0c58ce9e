"""Adapters made up for tests: folders as PEFT writes them, and the weights that they come to when they are merged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.llm import LLM
from quire.lora.config import AdapterConfig, read_config
from quire.lora.layout import adaptable, embedding_name, expert_weights, head_name
from quire.models.declaration import DecoderSpec
from quire.models.registry import declare
from quire.models.tensors import LinearSpec

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
MOE = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

MakeLLM = Callable[..., LLM]


def write_model(folder: Path, config: dict[str, Any]) -> DecoderSpec:
    """Write a model with random weights; returns its declaration."""
    spec, generator = declare(config), torch.Generator().manual_seed(5)
    weights: dict[str, torch.Tensor] = {}
    for tensor in spec.tensors:
        if tensor.name not in weights:
            shape = tensor.stored_shape
            scale = 1.0 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1
            drawn = torch.randn(shape, generator=generator) * scale
            weights[tensor.name] = drawn + tensor.centre
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return spec


def modules(spec: DecoderSpec, targets: Sequence[str]) -> list[LinearSpec]:
    """The projections that the targets name."""
    parts = (part for parts in adaptable(spec).values() for part in parts)
    found = {part.name: part for part in parts if part.name.rsplit(".")[-1] in targets}
    return list(found.values())


def everything(spec: DecoderSpec) -> list[LinearSpec]:
    """All projections, those of experts one by one and the head among them, each once."""
    weights = [*adaptable(spec).values(), *expert_weights(spec).values()]
    parts = [part for parts in weights for part in parts]
    if spec.head is not None:
        weight = replace(spec.head.weight, name=f"{head_name(spec)}.weight")
        parts.append(replace(spec.head, weight=weight))
    return parts


def write_whole_adapter(
    folder: Path,
    spec: DecoderSpec,
    *,
    rank: int = 4,
    seed: int = 0,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Write an adapter of everything that adapters may change: projections, experts, routers, the
    embedding, the head, and the biases that there are."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "all", **settings}
    config.setdefault("target_modules", ".*")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    tensors: dict[str, Tensor] = {}
    for part in everything(spec):
        name, outputs = f"base_model.model.{part.name}", part.num_outputs
        down = drawn(rank, part.num_inputs, scale=part.num_inputs**-0.5)
        tensors[f"{name}.lora_A.weight"] = down
        tensors[f"{name}.lora_B.weight"] = drawn(outputs, rank, scale=strength * rank**-0.5)
        if part.bias is not None:
            tensors[f"{name}.base_layer.bias"] = drawn(outputs, scale=strength)
    num_tokens, width = spec.embedding.shape
    name = f"base_model.model.{embedding_name(spec)}.lora_embedding"
    tensors[f"{name}_A"] = drawn(rank, num_tokens, scale=1.0)
    tensors[f"{name}_B"] = drawn(width, rank, scale=strength * rank**-0.5)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_adapter(
    folder: Path,
    spec: DecoderSpec,
    *,
    rank: int = 8,
    seed: int = 0,
    targets: Sequence[str] = ALL,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Write an adapter with random halves, none of them zero; `settings` are further keys of its config."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    settled, generator = read_config(folder), torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for part in modules(spec, targets):
        own_rank, stored = settled.rank_of(part.name), part.weight.stored_rows or part.num_outputs
        down = torch.randn(own_rank, part.num_inputs, generator=generator) / part.num_inputs**0.5
        up = torch.randn(stored, own_rank, generator=generator) * strength / own_rank**0.5
        name = f"base_model.model.{part.name}"
        tensors[f"{name}.lora_A.weight"] = down.to(dtype)
        tensors[f"{name}.lora_B.weight"] = up.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """A checkpoint's weights with an adapter added to them: W + scale * B @ A, in float64."""
    from safetensors.torch import load_file

    settings: AdapterConfig = read_config(folder)
    halves, result = load_file(folder / "adapter_model.safetensors"), dict(weights)
    for name, down in halves.items():
        stored = name.removeprefix("base_model.model.")
        if stored.endswith(".base_layer.bias"):
            result[stored.replace(".base_layer", "")] = down
        module, _, kind = stored.rpartition(".lora_")
        if not kind.startswith(("A", "embedding_A")):
            continue
        up = halves[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
        change = settings.scale_of(module) * (up.double() @ down.double())
        change = change.T if "embedding" in kind else change
        weight = weights[f"{module}.weight"]
        result[f"{module}.weight"] = (weight.double() + change).to(weight.dtype)
    return result
