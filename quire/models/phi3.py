"""Phi-3, Phi-3.5 and Phi-4-mini: fused weights, long RoPE, rotation of a part of each head."""

from __future__ import annotations

from functools import partial

from quire.models.blocks import AttentionSpec, BlockSpec, MlpSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions
from quire.models.fused import fused
from quire.models.parts import decoder, pre_norm_block
from quire.models.rope import LongScaling, read_rope
from quire.models.tensors import linear, rms_norm


def declare_phi3(config: ConfigReader) -> DecoderSpec:
    """Llama's arithmetic from a checkpoint that keeps QKV, and gate and up, as one tensor each."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim, is_partial=True)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-5))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    if not isinstance(rope.scaling, LongScaling | None):
        raise config.refuse("rope_scaling", "type default or longrope")
    window = config.optional_integer("sliding_window")
    config.require("full_attn_mod", 1)
    config.require("interpolate_factor", 1)

    def block(at: str, index: int) -> BlockSpec:
        query, key, value = fused(
            f"{at}.self_attn.qkv_proj", size.hidden, size.query, size.kv, size.kv
        )
        output = linear(f"{at}.self_attn.o_proj", size.query, size.hidden)
        heads = AttentionSpec(
            query, key, value, output, size.head_dim, size.head_dim**-0.5, rope, window=window
        )
        gate, up = fused(f"{at}.mlp.gate_up_proj", size.hidden, size.ffn, size.ffn)
        down = linear(f"{at}.mlp.down_proj", size.ffn, size.hidden)
        return pre_norm_block(at, norm, heads, MlpSpec(gate, up, down, activation))

    return decoder(config, size, norm, block)
