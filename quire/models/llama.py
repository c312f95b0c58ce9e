"""Llama 2, 3 and 3.x, and the many models that share their shape (TinyLlama, SmolLM 1 and 2,
Code Llama ...)."""

from __future__ import annotations

from functools import partial

from quire.models.blocks import BlockSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions
from quire.models.parts import attention, decoder, gated_mlp, pre_norm_block
from quire.models.rope import read_rope
from quire.models.tensors import rms_norm


def declare_llama(config: ConfigReader) -> DecoderSpec:
    """Pre-norm blocks, grouped heads, gated MLP; biases where the config has them."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    has_mlp_bias = config.flag("mlp_bias", False)
    config.require("rope_interleaved", False)

    def block(at: str, index: int) -> BlockSpec:
        heads = attention(at, size, rope, has_bias=has_bias, has_output_bias=has_bias)
        return pre_norm_block(
            at, norm, heads, gated_mlp(at, size, activation, has_bias=has_mlp_bias)
        )

    return decoder(config, size, norm, block)
