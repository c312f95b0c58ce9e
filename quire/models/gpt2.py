"""GPT-2: learned positions, layer norms, plain MLP, biases everywhere, weights stored [inputs,
outputs]."""

from __future__ import annotations

from quire.models.blocks import AttentionSpec, BlockSpec, MlpSpec, Sublayer, sequential
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dtype, read_head
from quire.models.fused import conv1d
from quire.models.tensors import TensorSpec, layer_norm


def declare_gpt2(config: ConfigReader) -> DecoderSpec:
    """GPT-2 has names of its own for every size."""
    hidden, num_heads = config.integer("n_embd"), config.integer("n_head", maximum=65536)
    if hidden % num_heads:
        raise config.refuse("n_head", f"divisors of n_embd={hidden}")
    ffn = config.optional_integer("n_inner") or 4 * hidden
    num_layers, num_positions = (
        config.integer("n_layer", maximum=4096),
        config.integer("n_positions"),
    )
    eps = config.number("layer_norm_epsilon", 1e-5)
    activation = config.choice("activation_function", ACTIVATIONS, "gelu_new")
    head_dim = hidden // num_heads
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    is_scaled_by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    config.ignore("reorder_and_upcast_attn")  # scores are always float32 here
    embedding = TensorSpec("transformer.wte.weight", (config.integer("vocab_size"), hidden))

    def block(at: str, layer: int) -> BlockSpec:
        query, key, value = conv1d(f"{at}.attn.c_attn", hidden, hidden, hidden, hidden)
        (output,) = conv1d(f"{at}.attn.c_proj", hidden, hidden)
        (up,) = conv1d(f"{at}.mlp.c_fc", hidden, ffn)
        (down,) = conv1d(f"{at}.mlp.c_proj", ffn, hidden)
        layer_scale = scale / (layer + 1) if is_scaled_by_layer else scale
        attention = AttentionSpec(query, key, value, output, head_dim, layer_scale, rope=None)
        return sequential(
            Sublayer(layer_norm(f"{at}.ln_1", hidden, eps), attention),
            Sublayer(layer_norm(f"{at}.ln_2", hidden, eps), MlpSpec(None, up, down, activation)),
        )

    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=num_positions,
        dtype=read_dtype(config),
        embedding=embedding,
        position_embedding=TensorSpec("transformer.wpe.weight", (num_positions, hidden)),
        blocks=tuple(block(f"transformer.h.{layer}", layer) for layer in range(num_layers)),
        final_norm=layer_norm("transformer.ln_f", hidden, eps),
        head=read_head(config, embedding, default_tied=True),
        optional_prefix="transformer.",
    )
