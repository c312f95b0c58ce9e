"""Qwen 1.5 and 2, sparse: Qwen 2's blocks with a mixture of experts beside a shared, gated MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.models.config_reader import ConfigReader
from quire.models.declaration import BlockSpec, DecoderSpec, ExpertsSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions
from quire.models.experts import (
    experts,
    read_routing,
    read_sparse_layers,
    require_full_attention,
)
from quire.models.parts import attention, decoder, gated_mlp, pre_norm_block
from quire.models.rope import read_rope


def declare_qwen2_moe(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder; layers without experts have an MLP of `intermediate_size`."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("qkv_bias", True)
    require_full_attention(config, size.num_layers)
    inner = config.integer("moe_intermediate_size", 1408)
    shared = replace(size, ffn=config.integer("shared_expert_intermediate_size", 5632))
    is_normalised = config.flag("norm_topk_prob", False)
    routing = read_routing(config, "num_experts", (60, 4), is_normalised=is_normalised)
    is_sparse = read_sparse_layers(config, size.num_layers)
    config.ignore("router_aux_loss_coef", "output_router_logits")  # training

    def mixture(at: str) -> ExpertsSpec:
        gate = linear(f"{at}.mlp.shared_expert_gate", size.hidden, 1)
        return replace(
            experts(f"{at}.mlp", size.hidden, inner, routing, activation),
            shared=gated_mlp(at, shared, activation, module="mlp.shared_expert"),
            shared_gate=replace(gate, keeps_floats=True),
        )

    def block(at: str, index: int) -> BlockSpec:
        heads = attention(at, size, rope, has_bias=has_bias)
        mlp = mixture(at) if is_sparse[index] else gated_mlp(at, size, activation)
        return pre_norm_block(at, norm, heads, mlp)

    return decoder(config, size, norm, block)
