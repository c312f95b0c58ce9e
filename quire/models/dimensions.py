"""The sizes and switches that most families' configs spell alike.
Families with other spellings read their own."""

from __future__ import annotations

from quire.common.frozen_record import FrozenRecord
from quire.models.config_reader import ConfigReader
from quire.models.tensors import LinearSpec, TensorSpec, linear
from quire.program.operations import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_DTYPES = {name: name for name in ("float32", "bfloat16", "float16")}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class Dimensions(FrozenRecord):
    """Sizes of a decoder, checked against each other."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int

    @property
    def query(self) -> int:
        """Values of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv(self) -> int:
        """Values of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim


def read_dimensions(config: ConfigReader) -> Dimensions:
    """Read the sizes under Llama's names, and refuse the switches that
    no family here implements."""
    hidden = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads", maximum=65536)
    num_kv_heads = config.integer("num_key_value_heads", num_heads, maximum=65536)
    if not config.has("head_dim") and hidden % num_heads:
        raise config.refuse(
            "num_attention_heads", f"divisors of hidden_size={hidden}, or head_dim beside it"
        )
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"divisors of num_attention_heads={num_heads}")
    head_dim = config.integer("head_dim", max(1, hidden // num_heads))
    if head_dim % 2:
        raise config.refuse("head_dim", "even head sizes (RoPE pairs the two halves)")
    return Dimensions(
        num_layers=config.integer("num_hidden_layers", maximum=4096),
        hidden=hidden,
        ffn=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
    )


TOKEN_CLASSIFICATION = "ForTokenClassification"
"""How architectures that classify each token end."""


def read_num_labels(config: ConfigReader) -> int | None:
    """Classes of a model that classifies texts or tokens; None for any other."""
    config.ignore("num_labels", "id2label", "label2id", "problem_type")
    if not config.architecture.endswith(("ForSequenceClassification", TOKEN_CLASSIFICATION)):
        return None
    names = config.raw("id2label") if config.has("id2label") else None
    if isinstance(names, dict) and names:
        return len(names)
    return config.integer("num_labels", 2)


def read_dtype(config: ConfigReader, default: str = "float32") -> str:
    """Return the checkpoint's own dtype: `dtype`, in older files `torch_dtype`;
    `default` where neither says."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    return config.choice(key, _DTYPES, default)


def read_layer_types(config: ConfigReader, default: tuple[str, ...]) -> tuple[bool, ...]:
    """Return which layers slide: `layer_types` if it is given, else `default`."""
    names = config.names("layer_types", _LAYER_TYPES, len(default)) or default
    return tuple(name == "sliding_attention" for name in names)


def read_windows(
    config: ConfigReader, default: tuple[str, ...], window: int | None
) -> tuple[int | None, ...]:
    """Return the window of every layer. A sliding layer without a size is a
    contradiction and is refused."""
    slides = read_layer_types(config, default)
    if any(slides) and window is None:
        raise config.refuse(
            "sliding_window", "a window size, because some layers are sliding_attention"
        )
    return tuple(window if is_sliding else None for is_sliding in slides)


def read_qwen_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: with `use_sliding_window`, the layers from `max_window_layers` on slide;
    without, none."""
    has_window = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096)
    num_full = min(config.integer("max_window_layers", 28, minimum=0), num_layers)
    if not has_window or window is None:
        window, num_full = None, num_layers
    default = ("full_attention",) * num_full + ("sliding_attention",) * (num_layers - num_full)
    return read_windows(config, default, window)


def read_head(config: ConfigReader, embedding: TensorSpec, *, default_tied: bool) -> LinearSpec:
    """Return the output projection: the embedding itself where the two are tied, else `lm_head`."""
    if config.flag("tie_word_embeddings", default_tied):
        return LinearSpec(embedding)
    vocab, hidden = embedding.shape
    return linear("lm_head", hidden, vocab)
