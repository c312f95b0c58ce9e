"""OLMo 2: norms after each sublayer instead of before,
and on whole projections of queries and keys."""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import BlockSpec, Sublayer, sequential
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions
from quire.models.parts import attention, decoder, gated_mlp
from quire.models.rope import read_rope
from quire.models.tensors import rms_norm


def declare_olmo2(config: ConfigReader) -> DecoderSpec:
    """Grouped heads, gated MLP, post-norms only."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-5))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)

    def block(at: str, index: int) -> BlockSpec:
        heads = replace(
            attention(at, size, rope, has_bias=has_bias, has_output_bias=has_bias),
            query_norm=norm(f"{at}.self_attn.q_norm", size=size.query),
            key_norm=norm(f"{at}.self_attn.k_norm", size=size.kv),
        )
        return sequential(
            Sublayer(None, heads, norm(f"{at}.post_attention_layernorm")),
            Sublayer(
                None, gated_mlp(at, size, activation), norm(f"{at}.post_feedforward_layernorm")
            ),
        )

    return decoder(config, size, norm, block)
