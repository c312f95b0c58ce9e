"""Qwen 1.5, 2 and 2.5: Llama blocks with biases on queries, keys and values."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.declaration import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, TensorSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_dtype, read_head, read_qwen_windows
from quire.models.rope import read_rope


def declare_qwen2(config: ConfigReader) -> DecoderSpec:
    """The layers from `max_window_layers` on slide if `use_sliding_window` is set."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    eps = config.number("rms_norm_eps", 1e-6)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    windows = read_qwen_windows(config, size.num_layers)
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))

    def block(at: str, window: int | None) -> BlockSpec:
        query = linear(f"{at}.self_attn.q_proj", size.hidden, size.query, has_bias=True)
        key = linear(f"{at}.self_attn.k_proj", size.hidden, size.kv, has_bias=True)
        value = linear(f"{at}.self_attn.v_proj", size.hidden, size.kv, has_bias=True)
        output = linear(f"{at}.self_attn.o_proj", size.query, size.hidden)
        gate = linear(f"{at}.mlp.gate_proj", size.hidden, size.ffn)
        up = linear(f"{at}.mlp.up_proj", size.hidden, size.ffn)
        down = linear(f"{at}.mlp.down_proj", size.ffn, size.hidden)
        return BlockSpec(
            attention_norm=rms_norm(f"{at}.input_layernorm", size.hidden, eps),
            attention=AttentionSpec(query, key, value, output, size.head_dim, size.head_dim**-0.5, rope, window=window),
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
