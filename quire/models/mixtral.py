"""Mixtral: Mistral's blocks with a mixture of experts in place of the MLP."""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import BlockSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions
from quire.models.experts import ExpertNames, experts, read_routing
from quire.models.parts import attention, decoder, pre_norm_block
from quire.models.rope import read_rope
from quire.models.tensors import rms_norm

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def declare_mixtral(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder whose experts weigh their share of the softmax over those chosen."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-5))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    window = config.optional_integer("sliding_window")
    routing = read_routing(config, "num_local_experts", (8, 2), is_normalised=True)
    config.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")  # training

    def block(at: str, index: int) -> BlockSpec:
        heads = replace(attention(at, size, rope), window=window)
        mixture = experts(
            f"{at}.block_sparse_moe",
            size.hidden,
            size.ffn,
            routing,
            activation,
            _NAMES,
            stacked_at=f"{at}.mlp",
        )
        return pre_norm_block(at, norm, heads, mixture)

    return decoder(config, size, norm, block)
