"""Qwen 1.5, 2 and 2.5: Llama blocks with biases on queries, keys and values."""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import BlockSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_qwen_windows
from quire.models.parts import attention, decoder, gated_mlp, pre_norm_block
from quire.models.rope import read_rope
from quire.models.tensors import rms_norm


def declare_qwen2(config: ConfigReader) -> DecoderSpec:
    """Declare Qwen 2. The layers from `max_window_layers` on slide if `use_sliding_window` is
    set."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    windows = read_qwen_windows(config, size.num_layers)

    def block(at: str, index: int) -> BlockSpec:
        heads = replace(attention(at, size, rope, has_bias=True), window=windows[index])
        return pre_norm_block(at, norm, heads, gated_mlp(at, size, activation))

    return decoder(config, size, norm, block)
