"""OLMo 2: norms after each sublayer instead of before, and on whole projections of queries and keys."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.declaration import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, TensorSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_dtype, read_head
from quire.models.rope import read_rope


def declare_olmo2(config: ConfigReader) -> DecoderSpec:
    """Grouped heads, gated MLP, post-norms only."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    eps = config.number("rms_norm_eps", 1e-5)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))

    def block(at: str) -> BlockSpec:
        query = linear(f"{at}.self_attn.q_proj", size.hidden, size.query, has_bias=has_bias)
        key = linear(f"{at}.self_attn.k_proj", size.hidden, size.kv, has_bias=has_bias)
        value = linear(f"{at}.self_attn.v_proj", size.hidden, size.kv, has_bias=has_bias)
        output = linear(f"{at}.self_attn.o_proj", size.query, size.hidden, has_bias=has_bias)
        gate = linear(f"{at}.mlp.gate_proj", size.hidden, size.ffn)
        up = linear(f"{at}.mlp.up_proj", size.hidden, size.ffn)
        down = linear(f"{at}.mlp.down_proj", size.ffn, size.hidden)
        query_norm = rms_norm(f"{at}.self_attn.q_norm", size.query, eps)
        key_norm = rms_norm(f"{at}.self_attn.k_norm", size.kv, eps)
        scale = size.head_dim**-0.5
        return BlockSpec(
            attention_norm=None,
            attention=AttentionSpec(query, key, value, output, size.head_dim, scale, rope, query_norm, key_norm),
            post_attention_norm=rms_norm(f"{at}.post_attention_layernorm", size.hidden, eps),
            mlp_norm=None,
            mlp=MlpSpec(gate, up, down, activation),
            post_mlp_norm=rms_norm(f"{at}.post_feedforward_layernorm", size.hidden, eps),
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
