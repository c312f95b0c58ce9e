"""Gemma 3, text: five sliding layers for each full one, with a RoPE of their own. As an encoder
(EmbeddingGemma) it attends to both sides.
"""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import BlockSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_windows
from quire.models.parts import attention, decoder, gated_mlp, two_norm_block
from quire.models.rope import read_local_and_global_rope
from quire.models.tensors import rms_norm


def declare_gemma3(config: ConfigReader) -> DecoderSpec:
    """Declare Gemma 3: as Gemma 2 without soft caps in attention,
    with norms on queries and keys and two RoPE bases."""
    size = read_dimensions(config)
    local_rope, global_rope = read_local_and_global_rope(config, size.head_dim)
    norm = partial(
        rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6), weight_offset=1.0
    )
    activation = config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    is_causal = not config.flag("use_bidirectional_attention", False)
    if not is_causal and config.architecture.endswith("ForCausalLM"):
        raise config.refuse("use_bidirectional_attention", "false for models that generate")
    config.require("attn_logit_softcapping", None)
    has_bias = config.flag("attention_bias", False)
    scale = config.number("query_pre_attn_scalar", 256, minimum=1e-3) ** -0.5
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    layer_types = tuple(
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(size.num_layers)
    )
    window = config.optional_integer("sliding_window", 4096)
    if window is not None and not is_causal:
        window = window // 2 + 1  # as wide on both sides as half of it, and the position itself
    windows = read_windows(config, layer_types, window)

    def block(at: str, index: int) -> BlockSpec:
        rope = global_rope if windows[index] is None else local_rope
        heads = replace(
            attention(at, size, rope, has_bias=has_bias, has_output_bias=has_bias),
            scale=scale,
            query_norm=norm(f"{at}.self_attn.q_norm", size=size.head_dim),
            key_norm=norm(f"{at}.self_attn.k_norm", size=size.head_dim),
            window=windows[index],
            is_causal=is_causal,
        )
        return two_norm_block(at, norm, heads, gated_mlp(at, size, activation))

    return replace(
        decoder(config, size, norm, block, default_tied=True),
        embedding_scale=size.hidden**0.5,
        final_soft_cap=config.optional_number("final_logit_softcapping", minimum=1e-3),
    )
