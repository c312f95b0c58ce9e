"""Llama 2, 3 and 3.x, and the many models that share their shape (TinyLlama, SmolLM 1 and 2, Code Llama ...)."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.declaration import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, TensorSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_dtype, read_head
from quire.models.rope import read_rope


def declare_llama(config: ConfigReader) -> DecoderSpec:
    """Pre-norm blocks, grouped heads, gated MLP; biases where the config asks for them."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    eps = config.number("rms_norm_eps", 1e-6)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    has_mlp_bias = config.flag("mlp_bias", False)
    config.require("rope_interleaved", False)
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))

    def block(at: str) -> BlockSpec:
        query = linear(f"{at}.self_attn.q_proj", size.hidden, size.query, has_bias=has_bias)
        key = linear(f"{at}.self_attn.k_proj", size.hidden, size.kv, has_bias=has_bias)
        value = linear(f"{at}.self_attn.v_proj", size.hidden, size.kv, has_bias=has_bias)
        output = linear(f"{at}.self_attn.o_proj", size.query, size.hidden, has_bias=has_bias)
        gate = linear(f"{at}.mlp.gate_proj", size.hidden, size.ffn, has_bias=has_mlp_bias)
        up = linear(f"{at}.mlp.up_proj", size.hidden, size.ffn, has_bias=has_mlp_bias)
        down = linear(f"{at}.mlp.down_proj", size.ffn, size.hidden, has_bias=has_mlp_bias)
        return BlockSpec(
            attention_norm=rms_norm(f"{at}.input_layernorm", size.hidden, eps),
            attention=AttentionSpec(query, key, value, output, size.head_dim, size.head_dim**-0.5, rope),
            mlp_norm=rms_norm(f"{at}.post_attention_layernorm", size.hidden, eps),
            mlp=MlpSpec(gate, up, down, activation),
        )

    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=size.max_positions,
        dtype=read_dtype(config),
        embedding=embedding,
        blocks=tuple(block(f"model.layers.{index}") for index in range(size.num_layers)),
        final_norm=rms_norm("model.norm", size.hidden, eps),
        head=read_head(config, embedding, default_tied=False),
    )
