"""Gemma 2: every other layer slides, soft caps, four norms a block with weights around zero."""

from __future__ import annotations

from functools import partial

from quire.models.config_reader import ConfigReader
from quire.models.declaration import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, TensorSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_dtype, read_head, read_windows
from quire.models.rope import read_rope


def declare_gemma2(config: ConfigReader) -> DecoderSpec:
    """Scaled embeddings, tied head; the first layer slides, the second does not, and so on."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, eps=config.number("rms_norm_eps", 1e-6), weight_offset=1.0)
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
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))

    def block(at: str, window: int | None) -> BlockSpec:
        query = linear(f"{at}.self_attn.q_proj", size.hidden, size.query, has_bias=has_bias)
        key = linear(f"{at}.self_attn.k_proj", size.hidden, size.kv, has_bias=has_bias)
        value = linear(f"{at}.self_attn.v_proj", size.hidden, size.kv, has_bias=has_bias)
        output = linear(f"{at}.self_attn.o_proj", size.query, size.hidden, has_bias=has_bias)
        gate = linear(f"{at}.mlp.gate_proj", size.hidden, size.ffn)
        up = linear(f"{at}.mlp.up_proj", size.hidden, size.ffn)
        down = linear(f"{at}.mlp.down_proj", size.ffn, size.hidden)
        attention = AttentionSpec(query, key, value, output, size.head_dim, scale, rope, window=window, soft_cap=soft_cap)
        return BlockSpec(
            attention_norm=norm(f"{at}.input_layernorm", size.hidden),
            attention=attention,
            post_attention_norm=norm(f"{at}.post_attention_layernorm", size.hidden),
            mlp_norm=norm(f"{at}.pre_feedforward_layernorm", size.hidden),
            mlp=MlpSpec(gate, up, down, activation),
            post_mlp_norm=norm(f"{at}.post_feedforward_layernorm", size.hidden),
        )

    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=size.max_positions,
        dtype=read_dtype(config),
        embedding=embedding,
        blocks=tuple(block(f"model.layers.{index}", windows[index]) for index in range(size.num_layers)),
        final_norm=norm("model.norm", size.hidden),
        head=read_head(config, embedding, default_tied=True),
        embedding_scale=size.hidden**0.5,
        final_soft_cap=config.optional_number("final_logit_softcapping", 30.0, minimum=1e-3),
    )
