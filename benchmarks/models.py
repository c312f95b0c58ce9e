"""Model folders with random weights, for measuring speed without downloading anything.

Speed does not depend on what weights say, as long as numbers stay ordinary: linear layers are drawn
with standard deviation 1/sqrt(hidden) and the embedding with 2/sqrt(hidden), so that logits are
neither flat nor one-hot.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
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
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": SMOLLM2_135M,
    "qwen3-0.6b": QWEN3_0_6B,
    "llama-1b": LLAMA_1B,
    "llama-8b": LLAMA_8B,
}
"""Configurations by the names that `--model` takes; the weights are random."""


def write_random_model(config: dict[str, Any], folder: Path) -> None:
    """Write `config.json` and `model.safetensors` with random bfloat16 weights (seed 0)
    in Hugging Face format."""
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


def write_w8a8(source: Path, folder: Path) -> None:
    """Write a model with 8-bit weights, a scale a row, for 8-bit activations quantized as they
    come, one scale a token.

    The format is compressed-tensors' "int-quantized", which vLLM reads; the embedding and the
    output head stay as they are.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.dim() < 2 or "embed" in name or "lm_head" in name:
            weights[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        weights[name] = (weight.float() / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale.to(torch.bfloat16)
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        },
        "input_activations": {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        },
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for each in source.glob("*.json"):
        (folder / each.name).write_bytes(each.read_bytes())
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m benchmarks.models SOURCE FOLDER`: random weights for a configuration,
    or with --w8a8 8-bit ones of a model."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.models"
    )
    parser.add_argument(
        "source",
        help=f"one of {', '.join(CONFIGS)}, or a config.json; with --w8a8 a model's folder",
    )
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument(
        "--w8a8", action="store_true", help="8-bit weights and activations, for vLLM"
    )
    args = parser.parse_args(argv)
    if args.w8a8:
        write_w8a8(Path(args.source), args.folder)
    else:
        write_random_model(
            CONFIGS.get(args.source) or json.loads(Path(args.source).read_text()), args.folder
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
