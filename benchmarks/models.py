"""Model folders with random weights, for measuring speed without downloading anything.

Speed does not depend on what weights say, as long as numbers stay ordinary: linear layers are drawn with standard deviation
1/sqrt(hidden) and the embedding with 2/sqrt(hidden), so that logits are neither flat nor one-hot.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {"smollm2-135m": SMOLLM2_135M, "qwen3-0.6b": QWEN3_0_6B}
"""Configurations by the names that `--model` takes; the weights are random."""


def write_random_model(config: dict[str, Any], folder: Path) -> None:
    """Write `config.json` and `model.safetensors` with random bfloat16 weights (seed 0) in Hugging Face format."""
    import torch
    from safetensors.torch import save_file

    from quire.models.registry import declare

    spec = declare(config)
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for tensor in spec.tensors:
        if tensor.name in weights:
            continue
        shape = tensor.stored_shape
        if len(shape) < 2:
            weights[tensor.name] = torch.full(shape, tensor.centre, dtype=torch.bfloat16)
            continue
        scale = (2.0 if tensor.name == spec.embedding.name else 1.0) / math.sqrt(spec.hidden_size)
        weights[tensor.name] = (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
