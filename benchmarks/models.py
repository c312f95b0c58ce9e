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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.declaration import DecoderSpec

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
QWEN3_30B_A3B_8L = QWEN3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2_LITE_8L = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": SMOLLM2_135M,
    "qwen3-0.6b": QWEN3_0_6B,
    "llama-1b": LLAMA_1B,
    "llama-8b": LLAMA_8B,
    "qwen3-30b-a3b-8l": QWEN3_30B_A3B_8L,
    "olmoe-1b-7b": OLMOE_1B_7B,
    "deepseek-v2-lite-8l": DEEPSEEK_V2_LITE_8L,
}
"""Configurations by the names that `--model` takes; the weights are random. `8l`: the first eight
layers, so that it fits memory beside its peers."""
_SHARD_BYTES = 4 << 30
"""What is drawn before it is written: safetensors copies what it writes."""


def write_random_model(
    config: dict[str, Any],
    folder: Path,
    change: Callable[[str, Tensor], Tensor] = lambda _name, tensor: tensor,
) -> None:
    """Write random bfloat16 weights (seed 0) in Hugging Face format, `model.safetensors` or shards
    with an index where they are large, and `config.json` at the end. Each tensor is changed by
    `change` first."""
    from quire.models.registry import declare

    folder.mkdir(parents=True, exist_ok=True)
    drawn = ((name, change(name, tensor)) for name, tensor in _drawn(declare(config)))
    _write_shards(drawn, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _drawn(spec: DecoderSpec) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the files, once."""
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = set[str]()
    for tensor in spec.tensors:
        if tensor.name in drawn:
            continue
        drawn.add(tensor.name)
        shape = tensor.stored_shape
        if len(shape) < 2:
            yield tensor.name, torch.full(shape, tensor.centre, dtype=torch.bfloat16)
            continue
        scale = (2.0 if tensor.name == spec.embedding.name else 1.0) / math.sqrt(spec.hidden_size)
        yield tensor.name, (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """As few files as `_SHARD_BYTES` allow; names say how many there are, so they come last."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        save_file(waiting, folder / f"shard-{len(shards)}", {"format": "pt"})
        shards.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and sum(each.nbytes for each in waiting.values()) + tensor.nbytes > _SHARD_BYTES:
            write()
        waiting[name] = tensor
    write()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_w8a8(source: Path, folder: Path) -> None:
    """Write a model with 8-bit weights, a scale a row, for 8-bit activations quantized as they
    come, one scale a token.

    The format is compressed-tensors' "int-quantized", which vLLM reads; the embedding and the
    output head stay as they are.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = {}
    files = map(load_file, sorted(source.glob("*.safetensors")))
    for name, weight in (each for file in files for each in file.items()):
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
