"""Mistral 7B and its kin: Llama blocks with one sliding window for all layers (or none)."""

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


def declare_mistral(config: ConfigReader) -> DecoderSpec:
    """Declare Mistral: as Llama without biases; `sliding_window` null means full attention."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    window = config.optional_integer("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    if set(read_windows(config, (kind,) * size.num_layers, window)) != {window}:
        raise config.refuse(
            "layer_types", f"{kind} in every layer, because sliding_window is {window}"
        )

    def block(at: str, index: int) -> BlockSpec:
        heads = replace(attention(at, size, rope), window=window)
        return pre_norm_block(at, norm, heads, gated_mlp(at, size, activation))

    return decoder(config, size, norm, block)
