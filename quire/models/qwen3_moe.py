"""Qwen 3, sparse: Qwen 3's blocks with a mixture of experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.models.config_reader import ConfigReader
from quire.models.declaration import BlockSpec, DecoderSpec, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions
from quire.models.experts import (
    experts,
    read_routing,
    read_sparse_layers,
    require_full_attention,
)
from quire.models.parts import attention, decoder, gated_mlp, pre_norm_block
from quire.models.rope import read_rope


def declare_qwen3_moe(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder; layers without experts have an MLP of `intermediate_size`."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    require_full_attention(config, size.num_layers)
    inner = config.integer("moe_intermediate_size", 768)
    is_normalised = config.flag("norm_topk_prob", False)
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    routing = read_routing(config, key, (128, 8), is_normalised=is_normalised)
    is_sparse = read_sparse_layers(config, size.num_layers)
    config.ignore("router_aux_loss_coef", "output_router_logits")  # training

    def block(at: str, index: int) -> BlockSpec:
        heads = replace(
            attention(at, size, rope, has_bias=has_bias, has_output_bias=has_bias),
            query_norm=norm(f"{at}.self_attn.q_norm", size=size.head_dim),
            key_norm=norm(f"{at}.self_attn.k_norm", size=size.head_dim),
        )
        mixture = experts(f"{at}.mlp", size.hidden, inner, routing, activation)
        mlp = mixture if is_sparse[index] else gated_mlp(at, size, activation)
        return pre_norm_block(at, norm, heads, mlp)

    return decoder(config, size, norm, block)
