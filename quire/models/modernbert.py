"""ModernBERT: an encoder of pre-norm blocks with RoPE and a gated MLP, most of whose layers attend
to neighbours alone.
"""

from __future__ import annotations

from quire.models.blocks import AttentionSpec, BlockSpec, MlpSpec, Sublayer, sequential
from quire.models.config_reader import ConfigReader
from quire.models.declaration import ClassifierSpec, DecoderSpec, DenseSpec, PoolingKind
from quire.models.dimensions import (
    ACTIVATIONS,
    TOKEN_CLASSIFICATION,
    read_dtype,
    read_layer_types,
    read_num_labels,
)
from quire.models.fused import fused
from quire.models.rope import RopeSpec
from quire.models.tensors import NormSpec, TensorSpec, layer_norm, linear

_KINDS: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean"}


def declare_modernbert(config: ConfigReader) -> DecoderSpec:
    """Every third layer is global; the first block has no norm before its attention."""
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_layers, ffn = config.integer("num_hidden_layers"), config.integer("intermediate_size")
    if hidden % num_heads:
        raise config.refuse("num_attention_heads", f"divisors of hidden_size={hidden}")
    _check_fixed(config)
    eps = config.number("norm_eps", 1e-5)
    activation = config.choice("hidden_activation", ACTIVATIONS, "gelu")
    head_dim = hidden // num_heads
    # As wide on both sides as half of it, and the position itself.
    window = config.integer("local_attention", 128) // 2 + 1
    slides, ropes = _layer_types(config, num_layers), _ropes(config, head_dim)

    def norm(name: str) -> NormSpec:
        return layer_norm(name, hidden, eps, has_bias=False)

    def block(index: int) -> BlockSpec:
        at = f"model.layers.{index}"
        query, key, value = fused(f"{at}.attn.Wqkv", hidden, hidden, hidden, hidden)
        gate, up = fused(f"{at}.mlp.Wi", hidden, ffn, ffn)
        heads = AttentionSpec(
            query,
            key,
            value,
            linear(f"{at}.attn.Wo", hidden, hidden),
            head_dim,
            head_dim**-0.5,
            rope=ropes[slides[index]],
            window=window if slides[index] else None,
            is_causal=False,
        )
        mlp = MlpSpec(gate, up, linear(f"{at}.mlp.Wo", ffn, hidden), activation)
        first = None if index == 0 else norm(f"{at}.attn_norm")
        return sequential(Sublayer(first, heads), Sublayer(norm(f"{at}.mlp_norm"), mlp))

    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=config.integer("max_position_embeddings"),
        dtype=read_dtype(config),
        embedding=TensorSpec(
            "model.embeddings.tok_embeddings.weight", (config.integer("vocab_size"), hidden)
        ),
        embedding_norm=norm("model.embeddings.norm"),
        blocks=tuple(block(index) for index in range(num_layers)),
        final_norm=norm("model.final_norm"),
        head=None,
        classifier=_classifier(config, hidden, eps),
        unused=("head.", "decoder."),
    )


def _check_fixed(config: ConfigReader) -> None:
    """Refuse what no ModernBERT has, and read over what changes no output."""
    for key in ("attention_bias", "mlp_bias", "norm_bias"):
        config.require(key, False)
    config.ignore(
        "embedding_dropout", "attention_dropout", "mlp_dropout", "initializer_cutoff_factor",
        "decoder_bias", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad",
        "sparse_prediction", "sparse_pred_ignore_index", "tie_word_embeddings",
    )  # fmt: skip
    # older files have these two, and nothing reads them
    config.require("position_embedding_type", "absolute")
    config.ignore("layer_norm_eps")


def _layer_types(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers slide."""
    period = config.integer("global_attn_every_n_layers", 3)
    default = tuple(
        "sliding_attention" if i % period else "full_attention" for i in range(num_layers)
    )
    return read_layer_types(config, default)


def _ropes(config: ConfigReader, head_dim: int) -> dict[bool, RopeSpec | None]:
    """RoPE of sliding layers, and of global ones, in the old spelling or the new."""
    found: dict[bool, RopeSpec | None] = {}
    section = config.section("rope_parameters")
    for slides, kind, key, theta in (
        (False, "full_attention", "global_rope_theta", 160_000.0),
        (True, "sliding_attention", "local_rope_theta", 10_000.0),
    ):
        own = None if section is None else section.section(kind)
        old = config.number(key, theta)
        if own is not None:
            own.require("rope_type", "default")
            old = own.number("rope_theta", old)
        found[slides] = RopeSpec(head_dim, old)
    return found


def _classifier(config: ConfigReader, hidden: int, eps: float) -> ClassifierSpec | None:
    num_labels = read_num_labels(config)
    kind = config.choice("classifier_pooling", _KINDS, "cls")
    activation = config.choice("classifier_activation", ACTIVATIONS, "gelu")
    has_bias = config.flag("classifier_bias", False)
    if num_labels is None:
        return None
    dense = DenseSpec(
        linear("head.dense", hidden, hidden, has_bias=has_bias),
        activation,
        layer_norm("head.norm", hidden, eps, has_bias=False),
    )
    return ClassifierSpec(
        kind,
        (dense, DenseSpec(linear("classifier", hidden, num_labels, has_bias=True))),
        is_per_token=config.architecture.endswith(TOKEN_CLASSIFICATION),
    )
