"""CLIP's image tower (Radford et al., arXiv:2103.00020), as models that read images have it: up to
the layer whose states they take."""

from __future__ import annotations

from quire.models.blocks import AttentionSpec, BlockSpec, Sublayer, sequential
from quire.models.config_reader import ConfigReader
from quire.models.declaration import RowsSpec
from quire.models.dimensions import ACTIVATIONS
from quire.models.parts import plain_mlp
from quire.models.tensors import LinearSpec, TensorSpec, layer_norm, linear
from quire.program.operations import Activation

VISION_ACTIVATIONS: dict[str, Activation] = {**ACTIVATIONS, "quick_gelu": "gelu_sigmoid"}
_CHANNELS = 3


def declare_clip(config: ConfigReader, at: str, layer: int) -> RowsSpec:
    """Declare the tower under the name `at`. `layer` counts states as transformers does: 0 is
    before the first block, -1 behind the last one. Blocks behind it are not loaded."""
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers", maximum=4096)
    if hidden % num_heads:
        raise config.refuse("num_attention_heads", f"divisors of hidden_size={hidden}")
    num_blocks = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 <= num_blocks <= num_layers:
        raise config.refuse("num_hidden_layers", f"numbers that have the layer {layer}")
    patch = patch_projection(config, f"{at}.embeddings.patch_embedding", hidden)
    num_positions = (config.integer("image_size") // config.integer("patch_size")) ** 2 + 1
    config.ignore("projection_dim", "initializer_factor", "vocab_size")
    eps = config.number("layer_norm_eps", 1e-5)
    activation = config.choice("hidden_act", VISION_ACTIVATIONS, "quick_gelu")
    ffn = config.integer("intermediate_size")
    return RowsSpec(
        width=patch.num_inputs,
        entry=patch,
        positions=TensorSpec(f"{at}.embeddings.position_embedding.weight", (num_positions, hidden)),
        first_position=TensorSpec(f"{at}.embeddings.class_embedding", (hidden,)),
        norm=layer_norm(f"{at}.pre_layrnorm", hidden, eps),
        blocks=tuple(
            encoder_block(f"{at}.encoder.layers.{index}", hidden, num_heads, ffn, activation, eps)
            for index in range(num_blocks)
        ),
    )


def patch_projection(
    config: ConfigReader, name: str, hidden: int, *, has_bias: bool = False
) -> LinearSpec:
    """Return the convolution whose kernels do not overlap, as a product with a patch's pixels."""
    size = config.integer("patch_size", maximum=1024)
    config.require("num_channels", _CHANNELS)
    if config.integer("image_size", maximum=1 << 16) < size:
        raise config.refuse("image_size", f"at least patch_size={size}")
    weight = TensorSpec(
        f"{name}.weight",
        (hidden, _CHANNELS * size * size),
        stored_as=(hidden, _CHANNELS, size, size),
    )
    return LinearSpec(weight, TensorSpec(f"{name}.bias", (hidden,)) if has_bias else None)


def encoder_block(
    at: str, hidden: int, num_heads: int, ffn: int, activation: Activation, eps: float
) -> BlockSpec:
    """Return a block of CLIP's and SigLIP's towers: a layer norm before each of two sublayers,
    attention over all rows."""
    query, key, value, output = (
        linear(f"{at}.self_attn.{name}_proj", hidden, hidden, has_bias=True)
        for name in ("q", "k", "v", "out")
    )
    head_dim = hidden // num_heads
    heads = AttentionSpec(
        query, key, value, output, head_dim, head_dim**-0.5, rope=None, is_causal=False
    )
    mlp = plain_mlp((f"{at}.mlp.fc1", f"{at}.mlp.fc2"), (hidden, ffn, hidden), activation)
    return sequential(
        Sublayer(layer_norm(f"{at}.layer_norm1", hidden, eps), heads),
        Sublayer(layer_norm(f"{at}.layer_norm2", hidden, eps), mlp),
    )
