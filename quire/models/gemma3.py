"""Gemma 3, text: five sliding layers for each full one, with a RoPE of their own."""

from __future__ import annotations

from functools import partial

from quire.models.config_reader import ConfigReader
from quire.models.declaration import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, TensorSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_dtype, read_head, read_windows
from quire.models.rope import read_local_and_global_rope


def declare_gemma3(config: ConfigReader) -> DecoderSpec:
    """As Gemma 2 without soft caps in attention, with norms on queries and keys and two RoPE bases."""
    size = read_dimensions(config)
    local_rope, global_rope = read_local_and_global_rope(config, size.head_dim)
    norm = partial(rms_norm, eps=config.number("rms_norm_eps", 1e-6), weight_offset=1.0)
    activation = config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    config.require("use_bidirectional_attention", False)
    config.require("attn_logit_softcapping", None)
    has_bias = config.flag("attention_bias", False)
    scale = config.number("query_pre_attn_scalar", 256, minimum=1e-3) ** -0.5
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    layer_types = tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(size.num_layers))
    windows = read_windows(config, layer_types, config.optional_integer("sliding_window", 4096))
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))

    def block(at: str, window: int | None) -> BlockSpec:
        query = linear(f"{at}.self_attn.q_proj", size.hidden, size.query, has_bias=has_bias)
        key = linear(f"{at}.self_attn.k_proj", size.hidden, size.kv, has_bias=has_bias)
        value = linear(f"{at}.self_attn.v_proj", size.hidden, size.kv, has_bias=has_bias)
        output = linear(f"{at}.self_attn.o_proj", size.query, size.hidden, has_bias=has_bias)
        gate = linear(f"{at}.mlp.gate_proj", size.hidden, size.ffn)
        up = linear(f"{at}.mlp.up_proj", size.hidden, size.ffn)
        down = linear(f"{at}.mlp.down_proj", size.ffn, size.hidden)
        query_norm = norm(f"{at}.self_attn.q_norm", size.head_dim)
        key_norm = norm(f"{at}.self_attn.k_norm", size.head_dim)
        rope = global_rope if window is None else local_rope
        attention = AttentionSpec(query, key, value, output, size.head_dim, scale, rope, query_norm, key_norm, window)
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
        final_soft_cap=config.optional_number("final_logit_softcapping", minimum=1e-3),
    )
