"""Checkpoints of draft heads as they are published, and what such heads draft by their definitions:
whole sequences, by torch and transformers, with nothing kept from step to step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

VOCAB_SIZE, HIDDEN = 96, 32
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 48,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 24,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 32, "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
NUM_DRAFT_IDS = 40

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From token ids [n], and states [n, H], at as many positions to logits [n, V] of the target's
tokens and to the states that follow."""


class Head:
    """A target in a folder, a head for it in the same or in another one, and both in torch."""

    def __init__(self, target: Any, states: Callable[[Any], Tensor], step: Step) -> None:
        self._target, self._states, self._step = target, states, step

    @torch.no_grad()
    def draft(self, known: list[int], most: int) -> tuple[list[int], float]:
        """The greedy draft behind these tokens, and the least distance of a choice from another."""
        output = self._target.model(torch.tensor([known[:-1]]), output_hidden_states=True)
        states, tokens = self._states(output), list(known[1:])
        drafted, margin = [], float("inf")
        for _ in range(most):
            logits, following = self._step(torch.tensor(tokens), states)
            best = logits[-1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            drafted.append(int(best.indices[0]))
            tokens.append(drafted[-1])
            states = torch.cat([states, following[-1:]])
        return drafted, margin


def _config(model_type: str, values: dict[str, Any]) -> Any:
    return AutoConfig.for_model(model_type, **values, attn_implementation="eager")


def _attended(rotary: nn.Module, config: Any, x: Tensor, attend: Any) -> Tensor:
    """Call a block, or its attention alone, on one sequence of rows [n, width]."""
    positions = torch.arange(len(x))[None]
    hidden = x[None, :, :HIDDEN]
    mask = create_causal_mask(config, hidden, None, None, positions)
    found = attend(x[None], position_embeddings=rotary(hidden, positions), attention_mask=mask)
    rows: Tensor = (found[0] if isinstance(found, tuple) else found)[0]
    return rows


def _randomised(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and "norm" in name
        scale = 0.1 if is_norm else (2.0 if "embed" in name else 1.5) / parameter.shape[-1] ** 0.5
        parameter.data = values * scale + float(is_norm)
    return module.eval()


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: each.detach().clone().contiguous() for name, each in tensors.items()},
        folder / "model.safetensors",
    )


def _llama(folder: Path) -> Any:
    config = _config("llama", LLAMA)
    target = _randomised(LlamaForCausalLM(config), 1)  # type: ignore[no-untyped-call]
    named = {**LLAMA, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    _write(folder, named, target.state_dict())
    return target


def write_eagle(target_folder: Path, folder: Path, *, has_embedding: bool = True) -> Head:
    """EAGLE for a Llama: two blocks, of which the first has no norm before attention."""
    target = _llama(target_folder)
    config = _config("llama", LLAMA | {"num_hidden_layers": 2})
    body: Any = nn.Module()
    body.fc = nn.Linear(2 * HIDDEN, HIDDEN)
    body.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(2))
    body.layers[0].input_layernorm = nn.Identity()
    _randomised(body, 2)
    rotary, embedding = LlamaRotaryEmbedding(config), target.model.embed_tokens

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x = body.fc(torch.cat([embedding(tokens), states], -1))
        for layer in body.layers:
            x = _attended(rotary, config, x, layer)
        return target.lm_head(x), x

    tensors = dict(body.state_dict())
    if has_embedding:
        tensors["embed_tokens.weight"] = embedding.weight
    named = {
        **LLAMA, "num_hidden_layers": 2, "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama", "bias": True,
    }  # fmt: skip
    _write(folder, named, tensors)
    return Head(target, lambda output: output.last_hidden_state[0], step)


def write_eagle3(
    target_folder: Path, folder: Path, *, is_normed: bool = False, prefix: str = ""
) -> Head:
    """EAGLE-3 for a Llama, with fewer tokens than that."""
    target = _llama(target_folder)
    config = _config("llama", LLAMA | {"num_hidden_layers": 1})
    body: Any = nn.Module()
    body.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
    layer: Any = LlamaDecoderLayer(config, 0)
    body.midlayer = layer
    layer.hidden_norm = LlamaRMSNorm(HIDDEN, 1e-5)
    for name in ("q_proj", "k_proj", "v_proj"):
        outputs = getattr(layer.self_attn, name).out_features
        setattr(layer.self_attn, name, nn.Linear(2 * HIDDEN, outputs, bias=False))
    body.norm = LlamaRMSNorm(HIDDEN, 1e-5)
    body.lm_head = nn.Linear(HIDDEN, NUM_DRAFT_IDS, bias=False)
    _randomised(body, 3)
    rotary, embedding = LlamaRotaryEmbedding(config), target.model.embed_tokens
    chosen = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    ids = chosen[:NUM_DRAFT_IDS].sort().values

    def states(output: Any) -> Tensor:
        taken = [output.hidden_states[index][0] for index in (2, 3, 3)]  # of six blocks
        found: Tensor = body.fc(torch.cat(taken, -1))
        return found

    def step(tokens: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        normed = layer.hidden_norm(given)
        joined = torch.cat([layer.input_layernorm(embedding(tokens)), normed], -1)
        x = normed if is_normed else given
        x = x + _attended(rotary, config, joined, layer.self_attn)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = torch.full((len(x), VOCAB_SIZE), -torch.inf)
        logits[:, ids] = body.lm_head(body.norm(x))
        return logits, x

    tensors: dict[str, Tensor] = {prefix + name: each for name, each in body.state_dict().items()}
    tensors["d2t"] = ids - torch.arange(NUM_DRAFT_IDS)
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64).index_fill_(0, ids, 1)
    named = {
        **LLAMA, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama", "draft_vocab_size": NUM_DRAFT_IDS, "norm_before_residual": is_normed,
    }  # fmt: skip
    _write(folder, named, tensors)
    return Head(target, states, step)


def write_mtp(folder: Path) -> Head:
    """A DeepSeek V3 with one more layer, whose name is the number of those of the target."""
    num_layers = int(DEEPSEEK["num_hidden_layers"])
    config = _config("deepseek_v3", DEEPSEEK)
    target = _randomised(DeepseekV3ForCausalLM(config), 5)  # type: ignore[no-untyped-call]
    body: Any = DeepseekV3DecoderLayer(config, num_layers)
    for name in ("enorm", "hnorm"):
        setattr(body, name, DeepseekV3RMSNorm(HIDDEN, 1e-5))
    body.eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
    body.shared_head = nn.Module()
    body.shared_head.norm = DeepseekV3RMSNorm(HIDDEN, 1e-5)
    _randomised(body, 6)
    rotary, embedding = DeepseekV3RotaryEmbedding(config), target.model.embed_tokens

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x = body.eh_proj(torch.cat([body.enorm(embedding(tokens)), body.hnorm(states)], -1))
        x = body.shared_head.norm(_attended(rotary, config, x, body))
        return target.lm_head(x), x

    tensors = dict(target.state_dict())
    at = f"model.layers.{num_layers}."
    tensors |= {at + name: each for name, each in body.state_dict().items()}
    tensors[f"{at}embed_tokens.weight"] = embedding.weight
    tensors[f"{at}shared_head.head.weight"] = target.lm_head.weight
    named = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    _write(folder, named, tensors)
    return Head(target, lambda output: output.last_hidden_state[0], step)
