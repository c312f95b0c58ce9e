"""Qwen 3, dense: Llama blocks with a norm on every query and key head."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.declaration import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, TensorSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_dtype, read_head, read_qwen_windows
from quire.models.rope import read_rope


def declare_qwen3(config: ConfigReader) -> DecoderSpec:
    """The layers from `max_window_layers` on slide if `use_sliding_window` is set."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    eps = config.number("rms_norm_eps", 1e-6)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    windows = read_qwen_windows(config, size.num_layers)
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))

    def block(at: str, window: int | None) -> BlockSpec:
        query = linear(f"{at}.self_attn.q_proj", size.hidden, size.query, has_bias=has_bias)
        key = linear(f"{at}.self_attn.k_proj", size.hidden, size.kv, has_bias=has_bias)
        value = linear(f"{at}.self_attn.v_proj", size.hidden, size.kv, has_bias=has_bias)
        output = linear(f"{at}.self_attn.o_proj", size.query, size.hidden, has_bias=has_bias)
        gate = linear(f"{at}.mlp.gate_proj", size.hidden, size.ffn)
        up = linear(f"{at}.mlp.up_proj", size.hidden, size.ffn)
        down = linear(f"{at}.mlp.down_proj", size.ffn, size.hidden)
        query_norm = rms_norm(f"{at}.self_attn.q_norm", size.head_dim, eps)
        key_norm = rms_norm(f"{at}.self_attn.k_norm", size.head_dim, eps)
        scale = size.head_dim**-0.5
        return BlockSpec(
            attention_norm=rms_norm(f"{at}.input_layernorm", size.hidden, eps),
            attention=AttentionSpec(query, key, value, output, size.head_dim, scale, rope, query_norm, key_norm, window),
            mlp_norm=rms_norm(f"{at}.post_attention_layernorm", size.hidden, eps),
            mlp=MlpSpec(gate, up, down, activation),
        )

    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=size.max_positions,
        dtype=read_dtype(config),
        embedding=embedding,
        blocks=tuple(block(f"model.layers.{index}", windows[index]) for index in range(size.num_layers)),
        final_norm=rms_norm("model.norm", size.hidden, eps),
        head=read_head(config, embedding, default_tied=False),
    )
