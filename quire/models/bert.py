"""BERT and those of its shape: RoBERTa, XLM-RoBERTa, DistilBERT, MPNet. Encoders with norms behind
each residual sum.

Each differs in names, in where positions begin, and in what it adds: token types, a bias by
relative position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.models.blocks import AttentionSpec, BlockSpec, MlpSpec, Sublayer, sequential
from quire.models.config_reader import ConfigReader
from quire.models.declaration import ClassifierSpec, DecoderSpec, DenseSpec, PositionBiasSpec
from quire.models.dimensions import (
    ACTIVATIONS,
    TOKEN_CLASSIFICATION,
    read_dtype,
    read_num_labels,
)
from quire.models.tensors import LinearSpec, TensorSpec, layer_norm, linear
from quire.program.operations import Activation

_HEADS = ("cls.", "lm_head.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.")
"""What checkpoints of masked language models hold besides."""
_ROBERTA_PADDING = 1
"""The token that RoBERTa's positions are counted from: the first text position is the one after it.
"""


class _Names(NamedTuple):
    """What a family calls the weights of one block."""

    query: str
    key: str
    value: str
    output: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


_BERT = _Names(
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_DISTILBERT = _Names(
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)
_MPNET = _BERT._replace(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)


class _Sizes(NamedTuple):
    """Of an encoder."""

    hidden: int
    num_heads: int
    num_layers: int
    ffn: int
    activation: Activation
    eps: float


def declare_bert(config: ConfigReader) -> DecoderSpec:
    """BERT. A classifier reads the pooler's output, which a plain encoder has and does not use."""
    size = _sizes(config)
    at = "bert"
    pooler = DenseSpec(
        linear(f"{at}.pooler.dense", size.hidden, size.hidden, has_bias=True), "tanh"
    )
    return _encoder(
        config,
        at,
        size,
        _BERT,
        num_types=_num_types(config),
        classifier=_classifier(config, size.hidden, "classifier", pooler),
    )


def declare_roberta(config: ConfigReader) -> DecoderSpec:
    """RoBERTa and XLM-RoBERTa: positions begin behind the padding token, texts have one type."""
    size = _sizes(config)
    config.integer("type_vocab_size", 1)  # of which the families use the first alone
    return _encoder(
        config,
        "roberta",
        size,
        _BERT,
        first_position=config.integer("pad_token_id", _ROBERTA_PADDING, minimum=0) + 1,
        num_types=1,
        classifier=_two_layer_classifier(config, size.hidden),
    )


def declare_distilbert(config: ConfigReader) -> DecoderSpec:
    """DistilBERT: half of BERT's layers, without types."""
    size = _Sizes(
        hidden=config.integer("dim"),
        num_heads=config.integer("n_heads", maximum=65536),
        num_layers=config.integer("n_layers", maximum=4096),
        ffn=config.integer("hidden_dim"),
        activation=config.choice("activation", ACTIVATIONS, "gelu"),
        eps=1e-12,
    )
    config.ignore("dropout", "qa_dropout", "seq_classif_dropout")
    config.ignore("sinusoidal_pos_embds", "tie_weights_", "tie_word_embeddings")  # all is stored
    pre = DenseSpec(linear("pre_classifier", size.hidden, size.hidden, has_bias=True), "relu")
    classifier = _classifier(config, size.hidden, "classifier", pre)
    return _encoder(
        config, "distilbert", size, _DISTILBERT, layers="transformer", classifier=classifier
    )


def declare_mpnet(config: ConfigReader) -> DecoderSpec:
    """MPNet: RoBERTa's positions, and T5's bias by relative position, which all layers share."""
    size = _sizes(config)
    num_buckets = config.integer("relative_attention_num_buckets", 32)
    table = TensorSpec(
        "mpnet.encoder.relative_attention_bias.weight", (num_buckets, size.num_heads)
    )
    return _encoder(
        config,
        "mpnet",
        size,
        _MPNET,
        first_position=_ROBERTA_PADDING + 1,
        bias=PositionBiasSpec(table, max_distance=128),
        classifier=_two_layer_classifier(config, size.hidden),
    )


def _sizes(config: ConfigReader) -> _Sizes:
    config.require("is_decoder", False)
    config.require("position_embedding_type", "absolute")
    config.ignore("attention_probs_dropout_prob", "hidden_dropout_prob", "tie_word_embeddings")
    return _Sizes(
        hidden=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads", maximum=65536),
        num_layers=config.integer("num_hidden_layers", maximum=4096),
        ffn=config.integer("intermediate_size"),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        eps=config.number("layer_norm_eps", 1e-12),
    )


def _num_types(config: ConfigReader) -> int:
    """Types of text that can come: a classifier may be given two texts."""
    num_types = config.integer("type_vocab_size", 2)
    has_pairs = config.architecture.endswith("ForSequenceClassification")
    return min(num_types, 2) if has_pairs else 1


def _classifier(
    config: ConfigReader, hidden: int, name: str, *layers: DenseSpec
) -> ClassifierSpec | None:
    num_labels = read_num_labels(config)
    if num_labels is None:
        return None
    if config.architecture.endswith(TOKEN_CLASSIFICATION):
        layer = DenseSpec(linear("classifier", hidden, num_labels, has_bias=True))
        return ClassifierSpec("cls", (layer,), is_per_token=True)
    return ClassifierSpec(
        "cls", (*layers, DenseSpec(linear(name, hidden, num_labels, has_bias=True)))
    )


def _two_layer_classifier(config: ConfigReader, hidden: int) -> ClassifierSpec | None:
    """RoBERTa's."""
    dense = DenseSpec(linear("classifier.dense", hidden, hidden, has_bias=True), "tanh")
    return _classifier(config, hidden, "classifier.out_proj", dense)


def _encoder(
    config: ConfigReader,
    at: str,
    size: _Sizes,
    names: _Names,
    *,
    layers: str = "encoder",
    first_position: int = 0,
    num_types: int = 0,
    bias: PositionBiasSpec | None = None,
    classifier: ClassifierSpec | None = None,
) -> DecoderSpec:
    hidden, table = size.hidden, f"{at}.embeddings"
    if hidden % size.num_heads:
        raise config.refuse("num_attention_heads", f"divisors of hidden_size={hidden}")
    num_rows = config.integer("max_position_embeddings")
    if num_rows <= first_position:
        raise config.refuse("max_position_embeddings", f"more than {first_position}")
    types = "token_type_embeddings.weight"
    block = _block(size, names, f"{at}.{layers}.layer")
    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=num_rows - first_position,
        dtype=read_dtype(config),
        embedding=TensorSpec(
            f"{table}.word_embeddings.weight", (config.integer("vocab_size"), hidden)
        ),
        position_embedding=TensorSpec(
            f"{table}.position_embeddings.weight",
            (num_rows - first_position, hidden),
            first_row=first_position,
            stored_rows=num_rows,
        ),
        token_types=_types(config, f"{table}.{types}", num_types, hidden),
        embedding_norm=layer_norm(f"{table}.LayerNorm", hidden, size.eps),
        blocks=tuple(block(index) for index in range(size.num_layers)),
        final_norm=None,
        head=None,
        position_bias=bias,
        classifier=classifier,
        optional_prefix=f"{at}.",
        unused=(
            *_HEADS,
            "pooler.",
            f"{at}.pooler.",
            *(f"{p}embeddings.position_ids" for p in ("", f"{at}.")),
        ),
    )


def _types(config: ConfigReader, name: str, num_types: int, hidden: int) -> TensorSpec | None:
    if num_types == 0:
        return None
    num_stored = config.integer("type_vocab_size", num_types)
    return TensorSpec(name, (num_types, hidden), stored_rows=num_stored)


def _block(size: _Sizes, names: _Names, at: str) -> Callable[[int], BlockSpec]:
    hidden, head_dim = size.hidden, size.hidden // size.num_heads

    def dense(at: str, num_inputs: int, num_outputs: int) -> LinearSpec:
        return linear(at, num_inputs, num_outputs, has_bias=True)

    def block(index: int) -> BlockSpec:
        here = f"{at}.{index}"
        query, key, value, output = (
            dense(f"{here}.{name}", hidden, hidden)
            for name in (names.query, names.key, names.value, names.output)
        )
        heads = AttentionSpec(
            query, key, value, output, head_dim, head_dim**-0.5, rope=None, is_causal=False
        )
        up = dense(f"{here}.{names.up}", hidden, size.ffn)
        down = dense(f"{here}.{names.down}", size.ffn, hidden)
        mlp = MlpSpec(None, up, down, size.activation)
        norms = [
            layer_norm(f"{here}.{name}", hidden, size.eps)
            for name in (names.attention_norm, names.output_norm)
        ]
        return sequential(
            Sublayer(None, heads, sum_norm=norms[0]), Sublayer(None, mlp, sum_norm=norms[1])
        )

    return block
