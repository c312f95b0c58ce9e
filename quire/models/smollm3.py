"""SmolLM3: Llama blocks of which some have no RoPE."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.declaration import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, TensorSpec, linear, rms_norm
from quire.models.dimensions import ACTIVATIONS, read_dimensions, read_dtype, read_head, read_windows
from quire.models.rope import read_rope


def declare_smollm3(config: ConfigReader) -> DecoderSpec:
    """`no_rope_layers` has a 1 for every layer *with* RoPE; without it every fourth layer goes without."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim, default_theta=2e6)
    eps = config.number("rms_norm_eps", 1e-6)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    interval = config.integer("no_rope_layer_interval", 4)
    ropes = [float((index + 1) % interval) for index in range(size.num_layers)]
    if config.has("no_rope_layers"):
        ropes = list(config.numbers("no_rope_layers", size.num_layers))
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    config.ignore("sliding_window")
    layer_types = tuple("full_attention" if has_rope or not window else "sliding_attention" for has_rope in ropes)
    windows = read_windows(config, layer_types, window)
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))

    def block(at: str, index: int) -> BlockSpec:
        query = linear(f"{at}.self_attn.q_proj", size.hidden, size.query, has_bias=has_bias)
        key = linear(f"{at}.self_attn.k_proj", size.hidden, size.kv, has_bias=has_bias)
        value = linear(f"{at}.self_attn.v_proj", size.hidden, size.kv, has_bias=has_bias)
        output = linear(f"{at}.self_attn.o_proj", size.query, size.hidden, has_bias=has_bias)
        gate = linear(f"{at}.mlp.gate_proj", size.hidden, size.ffn)
        up = linear(f"{at}.mlp.up_proj", size.hidden, size.ffn)
        down = linear(f"{at}.mlp.down_proj", size.ffn, size.hidden)
        layer_rope = rope if ropes[index] else None
        scale = size.head_dim**-0.5
        return BlockSpec(
            attention_norm=rms_norm(f"{at}.input_layernorm", size.hidden, eps),
            attention=AttentionSpec(query, key, value, output, size.head_dim, scale, layer_rope, window=windows[index]),
            mlp_norm=rms_norm(f"{at}.post_attention_layernorm", size.hidden, eps),
            mlp=MlpSpec(gate, up, down, activation),
        )

    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=size.max_positions,
        dtype=read_dtype(config),
        embedding=embedding,
        blocks=tuple(block(f"model.layers.{index}", index) for index in range(size.num_layers)),
        final_norm=rms_norm("model.norm", size.hidden, eps),
        head=read_head(config, embedding, default_tied=True),
    )
