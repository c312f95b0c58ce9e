"""OLMoE: Llama blocks with norms on whole projections of queries and keys, and a mixture of experts
in place of the MLP."""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import BlockSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions
from quire.models.experts import experts, read_routing
from quire.models.parts import attention, decoder, pre_norm_block
from quire.models.rope import read_rope
from quire.models.tensors import rms_norm


def declare_olmoe(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder whose experts weigh their share of the softmax over all experts, or, with
    `norm_topk_prob`, over those chosen."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-5))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    is_normalised = config.flag("norm_topk_prob", False)
    routing = read_routing(config, "num_experts", (64, 8), is_normalised=is_normalised)
    config.ignore("router_aux_loss_coef", "output_router_logits")  # training

    def block(at: str, index: int) -> BlockSpec:
        heads = replace(
            attention(at, size, rope, has_bias=has_bias, has_output_bias=has_bias),
            query_norm=norm(f"{at}.self_attn.q_norm", size=size.query),
            key_norm=norm(f"{at}.self_attn.k_norm", size=size.kv),
        )
        mixture = experts(f"{at}.mlp", size.hidden, size.ffn, routing, activation)
        return pre_norm_block(at, norm, heads, mixture)

    return decoder(config, size, norm, block)
