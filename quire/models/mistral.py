"""Mistral 7B and its kin: Llama blocks with one sliding window for all layers (or none)."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.declaration import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, TensorSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_dtype, read_head, read_windows
from quire.models.rope import read_rope


def declare_mistral(config: ConfigReader) -> DecoderSpec:
    """As Llama without biases; `sliding_window` null means full attention."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    eps = config.number("rms_norm_eps", 1e-6)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    window = config.optional_integer("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    if set(read_windows(config, (kind,) * size.num_layers, window)) != {window}:
        raise config.refuse("layer_types", f"{kind} in every layer, because sliding_window is {window}")
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))

    def block(at: str) -> BlockSpec:
        query = linear(f"{at}.self_attn.q_proj", size.hidden, size.query)
        key = linear(f"{at}.self_attn.k_proj", size.hidden, size.kv)
        value = linear(f"{at}.self_attn.v_proj", size.hidden, size.kv)
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
        blocks=tuple(block(f"model.layers.{index}") for index in range(size.num_layers)),
        final_norm=rms_norm("model.norm", size.hidden, eps),
        head=read_head(config, embedding, default_tied=False),
    )
