"""Tiny checkpoints whose weights are the same on every machine: integers of a counter-based hash,
scaled by powers of two.

Owns the configs and the tensors that each architecture stores, by the names of Hugging Face. Shares
no code with the package that reads them, so that a change of a declaration cannot change the
weights with it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

Config = Mapping[str, Any]
Shape = tuple[int, ...]

VOCAB = 256
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32",
}  # fmt: skip
_LLAMA = _SIZES | {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LONG_ROPE = {
    "type": "longrope", "short_factor": [1.0, 1.0, 1.01, 1.1],
    "long_factor": [1.0, 1.12, 2.19, 7.44],
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "moe_intermediate_size": 24, "n_routed_experts": 12,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS: dict[str, Config] = {
    "llama": _LLAMA,
    "llama3": _LLAMA
    | {"rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE, "torch_dtype": "bfloat16"},
    "llama yarn": _LLAMA | {"rope_scaling": _YARN, "torch_dtype": "float16"},
    "llama dynamic": _LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama biased": _LLAMA
    | {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "hidden_act": "gelu"},
    "llama wide": _LLAMA
    | {
        "hidden_size": 200,
        "intermediate_size": 552,
        "num_attention_heads": 6,
        "head_dim": 64,
        "vocab_size": 307,
    },
    "llama long": _LLAMA | {"max_position_embeddings": 2048, "num_hidden_layers": 1},
    # Sizes of GGUF's super-blocks, and a tied head.
    "llama tied": _LLAMA
    | {
        "hidden_size": 256,
        "intermediate_size": 288,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    },
    "mistral": _SIZES
    | {"architectures": ["MistralForCausalLM"], "rope_theta": 1e6, "sliding_window": 24},
    "qwen2": _SIZES
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1e6,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    }
    | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": _SIZES | {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "head_dim": 32},
    "gemma2": _SIZES
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 24,
    }
    | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": {name: value for name, value in _SIZES.items() if name != "hidden_act"}
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 24,
    }
    | {
        "sliding_window_pattern": 3,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 20,
        "num_key_value_heads": 1,
    }
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3": _SIZES
    | {
        "architectures": ["Phi3ForCausalLM"],
        "rope_scaling": _LONG_ROPE,
        "original_max_position_embeddings": 32,
    }
    | {"sliding_window": 40, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "vocab_size": VOCAB,
        "activation_function": "gelu_new",
        "torch_dtype": "float32",
    },
    "smollm3": _SIZES
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "rope_theta": 5e6,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
    }
    | {"tie_word_embeddings": True, "use_sliding_window": False},
    "mixtral": _SIZES
    | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2 moe": _SIZES
    | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 72}
    | {"num_hidden_layers": 3, "mlp_only_layers": [1], "use_sliding_window": False},
    "qwen3 moe": _SIZES
    | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 32, "norm_topk_prob": True},
    "olmoe": _SIZES
    | {"architectures": ["OlmoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3}
    | {"torch_dtype": "bfloat16"},
    "gpt oss": _SIZES
    | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 3}
    | {"sliding_window": 24, "num_hidden_layers": 3, "attention_bias": True}
    | {"rope_scaling": _YARN | {"truncate": False}},
    "deepseek v2": _SIZES
    | _LATENT
    | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None}
    | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "deepseek v3": _SIZES
    | _LATENT
    | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 40, "torch_dtype": "bfloat16"}
    | {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "olmo2": _SIZES
    | {"architectures": ["Olmo2ForCausalLM"], "rope_theta": 5e5, "torch_dtype": "bfloat16"},
}


def integers(name: str, count: int) -> NDArray[np.int16]:
    """Integers of 16 bits that `name` stands for: SplitMix64 of its checksum and a counter."""
    with np.errstate(over="ignore"):
        z = (
            np.arange(1, count + 1, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 32)
        ) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(48)).astype(np.uint16).view(np.int16)


def write_checkpoint(folder: Path, config: Config) -> Path:
    """A folder of `config.json` and weights in the config's own dtype."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    dtype = getattr(torch, config["torch_dtype"])
    # whose norms add 1 to their weights
    is_centred = config["architectures"][0].startswith("Gemma")
    tensors = {name: _numbers(name, shape, is_centred).to(dtype) for name, shape in _shapes(config)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _numbers(name: str, shape: Shape, is_centred: bool) -> Tensor:
    """float32: matrices such that outputs are about as large as inputs,
    norms around their centre."""
    values = torch.from_numpy(
        integers(name, int(np.prod(shape))).astype(np.float32) * 2.0**-15
    ).view(shape)
    if len(shape) == 1:
        is_norm_weight = name.endswith("weight")
        return values * 0.25 + (1.0 if is_norm_weight and not is_centred else 0.0)
    # small, for a tied head would else repeat the token that it is given
    if "embed" in name or ".wte." in name:
        return values * 2.0**-3
    return values * 2.0 ** (1 - (shape[-1].bit_length() - 1) // 2)


def _shapes(config: Config) -> Iterator[tuple[str, Shape]]:
    if "n_embd" in config:
        yield from _gpt2_shapes(config)
        return
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    is_tied = config.get("tie_word_embeddings", "Gemma" in config["architectures"][0])
    if not is_tied:
        yield "lm_head.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        if "kv_lora_rank" in config:
            shapes = _latent_shapes(config, layer)
        else:
            shapes = (*_projections(config, layer), *_norms(config))
        for name, shape in shapes:
            yield f"model.layers.{layer}.{name}", shape


def _latent_shapes(config: Config, layer: int) -> tuple[tuple[str, Shape], ...]:
    """All tensors of a layer of DeepSeek's."""
    hidden, heads, rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    vector, query = config["q_lora_rank"], (heads * (nope + rope), hidden)
    sizes: dict[str, Shape] = {
        "self_attn.kv_a_proj_with_mqa": (rank + rope, hidden),
        "self_attn.kv_a_layernorm": (rank,),
        "self_attn.kv_b_proj": (heads * (nope + value), rank),
        "self_attn.o_proj": (hidden, heads * value),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if vector is None:
        sizes["self_attn.q_proj"] = query
    else:
        sizes["self_attn.q_a_proj"] = (vector, hidden)
        sizes["self_attn.q_a_layernorm"] = (vector,)
        sizes["self_attn.q_b_proj"] = (query[0], vector)
    mlps = {"mlp": config["intermediate_size"]}
    if layer >= config["first_k_dense_replace"]:
        inner, num_experts = config["moe_intermediate_size"], config["n_routed_experts"]
        mlps = {f"mlp.experts.{index}": inner for index in range(num_experts)}
        mlps["mlp.shared_experts"] = inner * config["n_shared_experts"]
        sizes["mlp.gate"] = (num_experts, hidden)
    for name, width in mlps.items():
        sizes |= {f"{name}.{each}_proj": (width, hidden) for each in ("gate", "up")}
        sizes[f"{name}.down_proj"] = (hidden, width)
    found = [(f"{name}.weight", shape) for name, shape in sizes.items()]
    if "mlp.gate" in sizes and "V3" in config["architectures"][0]:
        found.append(("mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)))
    return tuple(found)


def _projections(config: Config, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    query, kv = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    if config["architectures"] == ["Phi3ForCausalLM"]:
        sizes = {"self_attn.qkv": (query + 2 * kv, hidden), "mlp.gate_up": (2 * ffn, hidden)}
    else:
        inputs = {
            f"self_attn.{part}": (size, hidden)
            for part, size in (("q", query), ("k", kv), ("v", kv))
        }
        sizes = inputs | {"mlp.gate": (ffn, hidden), "mlp.up": (ffn, hidden)}
    sizes |= {"self_attn.o": (hidden, query), "mlp.down": (hidden, ffn)}
    if "num_experts_per_tok" in config and layer not in config.get("mlp_only_layers", ()):
        sizes = {name: shape for name, shape in sizes.items() if not name.startswith("mlp")}
        is_gpt_oss = config["architectures"] == ["GptOssForCausalLM"]
        yield from _stacked_experts(config) if is_gpt_oss else _experts(config)
    is_qwen2 = config["architectures"][0].startswith("Qwen2")
    for name, shape in sizes.items():
        yield f"{name}_proj.weight", shape
        is_biased_in_qwen2 = is_qwen2 and name in ("self_attn.q", "self_attn.k", "self_attn.v")
        if config.get(
            "mlp_bias" if name.startswith("mlp") else "attention_bias", is_biased_in_qwen2
        ):
            yield f"{name}_proj.bias", shape[:1]


def _experts(config: Config) -> Iterator[tuple[str, Shape]]:
    """In place of an MLP."""
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size")
    inner = inner or config["intermediate_size"]
    is_mixtral = config["architectures"] == ["MixtralForCausalLM"]
    count = config["num_local_experts" if is_mixtral else "num_experts"]
    at = "block_sparse_moe" if is_mixtral else "mlp"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield f"{at}.gate.weight", (count, hidden)
    for expert in range(count):
        for name, shape in zip(names, ((inner, hidden),) * 2 + ((hidden, inner),), strict=True):
            yield f"{at}.experts.{expert}.{name}.weight", shape
    if shared := config.get("shared_expert_intermediate_size"):
        for name, shape in zip(names, ((shared, hidden),) * 2 + ((hidden, shared),), strict=True):
            yield f"{at}.shared_expert.{name}.weight", shape
        yield f"{at}.shared_expert_gate.weight", (1, hidden)


def _stacked_experts(config: Config) -> Iterator[tuple[str, Shape]]:
    """Of gpt-oss, and the sinks of attention: matrices are stored [inputs, outputs]."""
    hidden, inner, count = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    yield "self_attn.sinks", (config["num_attention_heads"],)
    yield "mlp.router.weight", (count, hidden)
    yield "mlp.router.bias", (count,)
    for name, inputs, outputs in (("gate_up", hidden, 2 * inner), ("down", inner, hidden)):
        yield f"mlp.experts.{name}_proj", (count, inputs, outputs)
        yield f"mlp.experts.{name}_proj_bias", (count, outputs)


def _norms(config: Config) -> Iterator[tuple[str, Shape]]:
    family, hidden, head_dim = config["architectures"][0], config["hidden_size"], config["head_dim"]
    names = ["post_attention_layernorm"]
    names += ["post_feedforward_layernorm"] if family.startswith(("Gemma", "Olmo2")) else []
    names += ["pre_feedforward_layernorm"] if family.startswith("Gemma") else []
    names += [] if family.startswith("Olmo2") else ["input_layernorm"]
    for name in names:
        yield f"{name}.weight", (hidden,)
    if family.startswith(("Qwen3", "Gemma3", "Olmo")):
        for name, heads in (("q_norm", "num_attention_heads"), ("k_norm", "num_key_value_heads")):
            yield (
                f"self_attn.{name}.weight",
                (head_dim * (config[heads] if family.startswith("Olmo") else 1),),
            )


def _gpt2_shapes(config: Config) -> Iterator[tuple[str, Shape]]:
    """Matrices are stored [inputs, outputs]."""
    hidden = config["n_embd"]
    yield "transformer.wte.weight", (config["vocab_size"], hidden)
    yield "transformer.wpe.weight", (config["n_positions"], hidden)
    sizes = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    sizes |= {"mlp.c_fc": (hidden, 4 * hidden), "mlp.c_proj": (4 * hidden, hidden)}
    blocks = [f"transformer.h.{layer}" for layer in range(config["n_layer"])]
    for name, shape in (
        (f"{block}.{name}", shape) for block in blocks for name, shape in sizes.items()
    ):
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[1:]
    for norm in (
        "transformer.ln_f",
        *(f"{block}.{name}" for block in blocks for name in ("ln_1", "ln_2")),
    ):
        yield f"{norm}.weight", (hidden,)
        yield f"{norm}.bias", (hidden,)
