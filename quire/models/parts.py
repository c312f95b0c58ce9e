"""What most decoders have in common, under Llama's names: attention, the gated MLP,
the pre-norm block, the ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.models.blocks import AttentionSpec, BlockSpec, Mixer, MlpSpec, Sublayer, sequential
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import Dimensions, read_dtype, read_head
from quire.models.rope import RopeSpec
from quire.models.tensors import NormSpec, TensorSpec, linear
from quire.program.operations import Activation

Norm = partial[NormSpec]
"""From a name to a norm of the hidden size; `size` names another."""


def attention(
    at: str,
    size: Dimensions,
    rope: RopeSpec | None,
    *,
    has_bias: bool = False,
    has_output_bias: bool = False,
) -> AttentionSpec:
    """Grouped heads with scores over the root of their size; `has_bias` is for queries,
    keys and values."""
    at = f"{at}.self_attn"
    query, key, value = (
        linear(f"{at}.{name}_proj", size.hidden, width, has_bias=has_bias)
        for name, width in (("q", size.query), ("k", size.kv), ("v", size.kv))
    )
    output = linear(f"{at}.o_proj", size.query, size.hidden, has_bias=has_output_bias)
    return AttentionSpec(query, key, value, output, size.head_dim, size.head_dim**-0.5, rope)


def gated_mlp(
    at: str,
    size: Dimensions,
    activation: Activation,
    *,
    has_bias: bool = False,
    module: str = "mlp",
) -> MlpSpec:
    """`down(activation(gate(x)) * up(x))`."""
    at = f"{at}.{module}"
    gate, up = (
        linear(f"{at}.{name}_proj", size.hidden, size.ffn, has_bias=has_bias)
        for name in ("gate", "up")
    )
    return MlpSpec(
        gate, up, linear(f"{at}.down_proj", size.ffn, size.hidden, has_bias=has_bias), activation
    )


def plain_mlp(
    names: tuple[str, str],
    widths: tuple[int, int, int],
    activation: Activation,
    *,
    has_bias: bool = True,
) -> MlpSpec:
    """`second(activation(first(x)))`: two layers by their names, and the widths of x, between them
    and behind them."""
    first, second = names
    inputs, ffn, outputs = widths
    return MlpSpec(
        None,
        linear(first, inputs, ffn, has_bias=has_bias),
        linear(second, ffn, outputs, has_bias=has_bias),
        activation,
    )


def pre_norm_block(at: str, norm: Norm, attention: Mixer, mlp: Mixer) -> BlockSpec:
    """Return a norm before each of two sublayers, and none behind them."""
    return sequential(
        Sublayer(norm(f"{at}.input_layernorm"), attention),
        Sublayer(norm(f"{at}.post_attention_layernorm"), mlp),
    )


def two_norm_block(at: str, norm: Norm, attention: Mixer, mlp: Mixer) -> BlockSpec:
    """Gemma's: a norm before each of two sublayers, and one behind it."""
    return sequential(
        Sublayer(norm(f"{at}.input_layernorm"), attention, norm(f"{at}.post_attention_layernorm")),
        Sublayer(
            norm(f"{at}.pre_feedforward_layernorm"), mlp, norm(f"{at}.post_feedforward_layernorm")
        ),
    )


def decoder(
    config: ConfigReader,
    size: Dimensions,
    norm: Norm,
    block: Callable[[str, int], BlockSpec],
    *,
    default_tied: bool = False,
    default_dtype: str = "float32",
) -> DecoderSpec:
    """Return blocks (from where each lies in the checkpoint, and its index)
    between an embedding and a head, which may be tied."""
    embedding = TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden))
    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=size.max_positions,
        dtype=read_dtype(config, default_dtype),
        embedding=embedding,
        blocks=tuple(block(f"model.layers.{index}", index) for index in range(size.num_layers)),
        final_norm=norm("model.norm"),
        head=read_head(config, embedding, default_tied=default_tied),
    )
