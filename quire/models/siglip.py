"""SigLIP's image tower (Zhai et al., arXiv:2303.15343): CLIP's without a class token, with a bias
on the patches and another activation."""

from __future__ import annotations

from quire.models.clip import encoder_block, patch_projection
from quire.models.config_reader import ConfigReader
from quire.models.declaration import RowsSpec
from quire.models.dimensions import ACTIVATIONS
from quire.models.tensors import TensorSpec


def declare_siglip(config: ConfigReader, at: str, layer: int) -> RowsSpec:
    """Declare the tower under the name `at`, up to the layer as `declare_clip` counts them; before
    the norm that stands behind the last one."""
    hidden = config.integer("hidden_size", 768)
    num_heads = config.integer("num_attention_heads", 12)
    num_layers = config.integer("num_hidden_layers", 12, maximum=4096)
    if hidden % num_heads:
        raise config.refuse("num_attention_heads", f"divisors of hidden_size={hidden}")
    num_blocks = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 <= num_blocks <= num_layers:
        raise config.refuse("num_hidden_layers", f"numbers that have the layer {layer}")
    patch = patch_projection(config, f"{at}.embeddings.patch_embedding", hidden, has_bias=True)
    num_positions = (config.integer("image_size") // config.integer("patch_size")) ** 2
    config.ignore("vision_use_head", "projection_dim", "vocab_size", "initializer_factor")
    eps = config.number("layer_norm_eps", 1e-6)
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    ffn = config.integer("intermediate_size", 3072)
    return RowsSpec(
        width=patch.num_inputs,
        entry=patch,
        positions=TensorSpec(f"{at}.embeddings.position_embedding.weight", (num_positions, hidden)),
        blocks=tuple(
            encoder_block(f"{at}.encoder.layers.{index}", hidden, num_heads, ffn, activation, eps)
            for index in range(num_blocks)
        ),
    )
