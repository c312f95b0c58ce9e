"""SmolLM3: Llama blocks of which some have no RoPE."""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import BlockSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_windows
from quire.models.parts import attention, decoder, gated_mlp, pre_norm_block
from quire.models.rope import read_rope
from quire.models.tensors import rms_norm


def declare_smollm3(config: ConfigReader) -> DecoderSpec:
    """`no_rope_layers` has a 1 for every layer *with* RoPE;
    without it every fourth layer goes without."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim, default_theta=2e6)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    interval = config.integer("no_rope_layer_interval", 4)
    ropes = [float((index + 1) % interval) for index in range(size.num_layers)]
    if config.has("no_rope_layers"):
        ropes = list(config.numbers("no_rope_layers", size.num_layers))
    window = (
        config.optional_integer("sliding_window")
        if config.flag("use_sliding_window", False)
        else None
    )
    config.ignore("sliding_window")
    layer_types = tuple(
        "full_attention" if has_rope or not window else "sliding_attention" for has_rope in ropes
    )
    windows = read_windows(config, layer_types, window)

    def block(at: str, index: int) -> BlockSpec:
        heads = attention(
            at, size, rope if ropes[index] else None, has_bias=has_bias, has_output_bias=has_bias
        )
        return pre_norm_block(
            at, norm, replace(heads, window=windows[index]), gated_mlp(at, size, activation)
        )

    return decoder(config, size, norm, block, default_tied=True)
