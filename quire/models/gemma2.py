"""Gemma 2: every other layer slides, soft caps, four norms a block with weights around zero."""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import BlockSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_windows
from quire.models.parts import attention, decoder, gated_mlp, two_norm_block
from quire.models.rope import read_rope
from quire.models.tensors import rms_norm


def declare_gemma2(config: ConfigReader) -> DecoderSpec:
    """Scaled embeddings, tied head; the first layer slides, the second does not, and so on."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(
        rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6), weight_offset=1.0
    )
    activation = config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    config.ignore("hidden_act")  # superseded by hidden_activation
    config.require("use_bidirectional_attention", False)
    has_bias = config.flag("attention_bias", False)
    soft_cap = config.optional_number("attn_logit_softcapping", 50.0, minimum=1e-3)
    scale = config.number("query_pre_attn_scalar", 256, minimum=1e-3) ** -0.5
    window = config.optional_integer("sliding_window", 4096)
    config.require("sliding_window_size", window)
    layer_types = ("sliding_attention", "full_attention") * size.num_layers
    windows = read_windows(config, layer_types[: size.num_layers], window)

    def block(at: str, index: int) -> BlockSpec:
        heads = attention(at, size, rope, has_bias=has_bias, has_output_bias=has_bias)
        heads = replace(heads, scale=scale, window=windows[index], soft_cap=soft_cap)
        return two_norm_block(at, norm, heads, gated_mlp(at, size, activation))

    return replace(
        decoder(config, size, norm, block, default_tied=True),
        embedding_scale=size.hidden**0.5,
        final_soft_cap=config.optional_number("final_logit_softcapping", 30.0, minimum=1e-3),
    )
