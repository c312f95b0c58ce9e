"""What GGUF files of gpt-oss and of DeepSeek V2 and V3 say, in the words of their configs.

Owns the names of these two architectures. What llama.cpp knows by the architecture, and files do
not say, is stated here: that gpt-oss' yarn is not rounded to whole dimensions, and that DeepSeek's
experts are weighed by a softmax unless the file says sigmoid. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from quire.weights.gguf.metadata import Metadata

GPT_OSS_NAMES: Final[Mapping[str, str]] = {
    "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
}  # fmt: skip
DEEPSEEK_NAMES: Final[Mapping[str, str]] = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
WHOLE_NAMES: Final[Mapping[str, str]] = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
"""Of vectors whose names have no `weight` or `bias` in checkpoints."""
_NO_GATING, _SOFTMAX, _SIGMOID = 0, 1, 2
_LOG_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"
_ENDS: Final = ("<|return|>", "<|call|>", "<|endoftext|>")


def gpt_oss_config(data: Metadata) -> dict[str, object]:
    """Return the keys that gpt-oss has beside sizes."""
    config: dict[str, object] = {
        "num_local_experts": data.integer("expert_count"),
        "num_experts_per_tok": data.integer("expert_used_count"),
        "sliding_window": data.integer("attention.sliding_window"),
        "intermediate_size": data.integer("expert_feed_forward_length"),
    }
    tokens = data.file.metadata.get("tokenizer.ggml.tokens")
    listed = tokens if isinstance(tokens, list) else []
    ends = [listed.index(each) for each in _ENDS if each in listed]
    return config | ({"eos_token_id": ends} if ends else {})


def deepseek_sizes(data: Metadata) -> dict[str, object]:
    """Return the sizes of latent attention. Files of before it was folded have whole keys and
    values under `attention.key_length`, newer ones under `attention.key_length_mla`."""
    rotated = data.integer("rope.dimension_count")
    key = data.integer("attention.key_length_mla", data.integer("attention.key_length"))
    value = data.integer("attention.value_length_mla", data.integer("attention.value_length"))
    if key <= rotated:
        raise data.refuse("rope.dimension_count", f"less than a head's keys, {key}")
    rank = data.value("attention.q_lora_rank")
    return {
        "num_key_value_heads": data.integer("attention.head_count"),
        "q_lora_rank": None if rank in (None, 0) else data.integer("attention.q_lora_rank"),
        "kv_lora_rank": data.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
    }


def deepseek_config(data: Metadata) -> dict[str, object]:
    """Return the keys of V2, or of V3 where experts are chosen by sigmoids."""
    gating = data.integer("expert_gating_func", _NO_GATING)
    if gating not in (_NO_GATING, _SOFTMAX, _SIGMOID):
        raise data.refuse("expert_gating_func", "1 (softmax) and 2 (sigmoid)")
    is_v3 = gating == _SIGMOID
    num_groups = data.integer("expert_group_count", 1)
    plain = "greedy" if num_groups <= 1 else "group_limited_greedy"
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "n_routed_experts": data.integer("expert_count"),
        "num_experts_per_tok": data.integer("expert_used_count"),
        "n_shared_experts": data.integer("expert_shared_count", 0),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "first_k_dense_replace": data.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": data.number("expert_weights_scale", 1.0),
        "norm_topk_prob": data.flag("expert_weights_norm", False),
        "topk_method": "noaux_tc" if is_v3 else plain,
        "n_group": max(1, num_groups),
        "topk_group": data.integer("expert_group_used_count", 1),
    }


def yarn_extras(data: Metadata) -> dict[str, object]:
    """Return what scaling by yarn has beside a factor and a length."""
    if data.architecture == "gpt-oss":
        return {"truncate": False}
    if data.architecture != "deepseek2" or data.value(_LOG_MULTIPLIER) is None:
        return {}
    # a tenth of `mscale_all_dim`, stored as float32; published files have `mscale` equal to it
    scale = round(data.number(_LOG_MULTIPLIER) / 0.1, 6)
    if not math.isfinite(scale) or scale < 0:
        raise data.refuse(_LOG_MULTIPLIER, "numbers from zero on")
    return {"mscale": scale, "mscale_all_dim": scale}
