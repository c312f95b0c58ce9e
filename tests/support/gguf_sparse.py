"""GGUF files of gpt-oss and DeepSeek as llama.cpp's converter lays them out, beside a Hugging Face
folder of the numbers that they stand for.

Written with the `gguf` package, under its names of tensors and metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import ExpertGatingFuncType, RopeScalingType
from gguf_files import BLOCKS, Array, random_blocks
from safetensors.torch import load_file, save_file

Config = Mapping[str, Any]


class SparseFile:
    """A file that is being written, and its twin's tensors."""

    def __init__(
        self, folder: Path, original: Path, architecture: str, encodings: Mapping[str, str]
    ) -> None:
        """`encodings`: the beginning of a name within a layer to a block encoding; others are
        float32."""
        self.config: dict[str, Any] = json.loads((original / "config.json").read_text())
        tensors = load_file(original / "model.safetensors")
        self.twin: dict[str, Array] = {
            name: np.asarray(tensor.float().numpy()) for name, tensor in tensors.items()
        }
        self.path = folder / "model.gguf"
        self.writer = GGUFWriter(self.path, architecture)
        self._folder, self._encodings = folder, encodings
        self._rng = np.random.default_rng(5)

    def add(self, name: str, numbers: Array) -> Array:
        """Store a tensor, and return what stands for it: of block encodings, random numbers."""
        within = name.split(".", 2)[-1]
        kind = next((k for start, k in self._encodings.items() if within.startswith(start)), None)
        if kind is None or within.endswith(".bias"):
            self.writer.add_tensor(name, np.ascontiguousarray(numbers, dtype=np.float32))
            return numbers
        data, meant = random_blocks(kind, numbers.shape, self._rng)
        rows = np.frombuffer(data, np.uint8).reshape(*numbers.shape[:-1], -1)
        assert BLOCKS[kind][0] == GGMLQuantizationType[kind]
        self.writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[kind])
        return meant

    def move(self, hf: str, name: str) -> None:
        """Store one of the twin's tensors as it is."""
        if hf in self.twin:
            self.twin[hf] = self.add(name, self.twin[hf])

    def common(self) -> None:
        """What both families have."""
        config, writer = self.config, self.writer
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        default_theta = 150000.0 if "sliding_window" in config else 10000.0
        writer.add_rope_freq_base(config.get("rope_theta", default_theta))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if scaling := config.get("rope_scaling"):
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling["factor"])
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        self.move("model.embed_tokens.weight", "token_embd.weight")
        self.move("model.norm.weight", "output_norm.weight")
        self.move("lm_head.weight", "output.weight")

    def finish(self) -> tuple[Path, Path]:
        """Write both; the file and the twin's folder."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        twin = self._folder / "twin"
        twin.mkdir()
        stored = {name: torch.from_numpy(np.ascontiguousarray(n)) for name, n in self.twin.items()}
        save_file(stored, twin / "model.safetensors")
        (twin / "config.json").write_text(json.dumps(self.config | {"torch_dtype": "float32"}))
        return self.path, twin


_GPT_OSS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.router": "ffn_gate_inp",
}  # fmt: skip


def store_gpt_oss(folder: Path, original: Path, encodings: Mapping[str, str]) -> tuple[Path, Path]:
    """(file, twin)"""
    out = SparseFile(folder, original, "gpt-oss", encodings)
    out.common()
    writer, config = out.writer, out.config
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    for layer in range(config["num_hidden_layers"]):
        hf, at = f"model.layers.{layer}", f"blk.{layer}"
        for module, name in _GPT_OSS.items():
            for kind in ("weight", "bias"):
                out.move(f"{hf}.{module}.{kind}", f"{at}.{name}.{kind}")
        out.move(f"{hf}.self_attn.sinks", f"{at}.attn_sinks.weight")
        # in the checkpoint [inputs, outputs], columns of gate and up in turns
        both = f"{hf}.mlp.experts.gate_up_proj"
        for first, role in enumerate(("gate", "up")):
            rows = out.twin[both].swapaxes(1, 2)[:, first::2]
            meant = out.add(f"{at}.ffn_{role}_exps.weight", rows)
            out.twin[both][:, :, first::2] = meant.swapaxes(1, 2)
            out.add(f"{at}.ffn_{role}_exps.bias", out.twin[f"{both}_bias"][:, first::2])
        down = f"{hf}.mlp.experts.down_proj"
        meant = out.add(f"{at}.ffn_down_exps.weight", out.twin[down].swapaxes(1, 2))
        out.twin[down] = meant.swapaxes(1, 2)
        out.add(f"{at}.ffn_down_exps.bias", out.twin[f"{down}_bias"])
    return out.finish()


_DEEPSEEK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def store_deepseek(
    folder: Path, original: Path, encodings: Mapping[str, str], *, is_split: bool
) -> tuple[Path, Path]:
    """(file, twin). `is_split`: what makes keys and values of latents lies apart, keys turned, as
    in files for folded attention; else as in those of before."""
    out = SparseFile(folder, original, "deepseek2", encodings)
    out.common()
    _deepseek_metadata(out.writer, out.config, is_split=is_split)
    config, count = out.config, out.config["n_routed_experts"]
    for layer in range(config["num_hidden_layers"]):
        hf, at = f"model.layers.{layer}", f"blk.{layer}"
        for module, name in _DEEPSEEK.items():
            out.move(f"{hf}.{module}.weight", f"{at}.{name}.weight")
        out.move(f"{hf}.mlp.gate.e_score_correction_bias", f"{at}.exp_probs_b.bias")
        _store_heads(out, hf, at, is_split=is_split)
        if layer < config["first_k_dense_replace"]:
            continue
        for role in ("gate", "up", "down"):
            names = [f"{hf}.mlp.experts.{each}.{role}_proj.weight" for each in range(count)]
            stacked = np.stack([out.twin[name] for name in names])
            meant = out.add(f"{at}.ffn_{role}_exps.weight", stacked)
            out.twin |= dict(zip(names, meant, strict=True))
    return out.finish()


def _store_heads(out: SparseFile, hf: str, at: str, *, is_split: bool) -> None:
    name, config = f"{hf}.self_attn.kv_b_proj.weight", out.config
    if not is_split:
        return out.move(name, f"{at}.attn_kv_b.weight")
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    heads = out.twin[name].reshape(config["num_attention_heads"], nope + value, -1)
    keys = out.add(f"{at}.attn_k_b.weight", heads[:, :nope].swapaxes(1, 2))
    values = out.add(f"{at}.attn_v_b.weight", heads[:, nope:])
    whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    out.twin[name] = whole.reshape(out.twin[name].shape)
    return None


def _deepseek_metadata(writer: GGUFWriter, config: Config, *, is_split: bool) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key = config["qk_nope_head_dim"] + rotated
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_head_count_kv(1 if is_split else config["num_attention_heads"])
    writer.add_key_length(rank + rotated if is_split else key)
    writer.add_value_length(rank if is_split else config["v_head_dim"])
    if is_split:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config.get("routed_scaling_factor", 1.0))
    if config["n_group"] > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config["architectures"] == ["DeepseekV3ForCausalLM"]:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
    if scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
