"""NomicBERT: an encoder with BERT's norms, RoPE in place of learned positions, and a gated MLP."""

from __future__ import annotations

from quire.models.blocks import AttentionSpec, BlockSpec, MlpSpec, Sublayer, sequential
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, read_dtype
from quire.models.fused import fused
from quire.models.rope import RopeSpec, read_rope
from quire.models.tensors import TensorSpec, layer_norm, linear
from quire.program.operations import Activation

_ACTIVATIONS: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu"}


def declare_nomic_bert(config: ConfigReader) -> DecoderSpec:
    """The config is as transformers writes it, or as the model's authors did, after GPT-2's."""
    if config.has("n_embd"):
        hidden, num_heads, num_layers, ffn, activation, eps, max_len, rope = _original(config)
    else:
        hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        num_layers, ffn = config.integer("num_hidden_layers"), config.integer("intermediate_size")
        activation = config.choice("hidden_act", ACTIVATIONS, "silu")
        eps, max_len = (
            config.number("layer_norm_eps", 1e-12),
            config.integer("max_position_embeddings"),
        )
        config.ignore("attention_probs_dropout_prob", "hidden_dropout_prob", "tie_word_embeddings")
        head_dim = config.integer("head_dim", max(1, hidden // num_heads))
        if head_dim * num_heads != hidden:
            raise config.refuse(
                "head_dim", f"hidden_size / num_attention_heads={hidden // num_heads}"
            )
        rope = read_rope(config, head_dim, default_theta=1000.0)
    head_dim, num_types = hidden // num_heads, config.integer("type_vocab_size", 2)

    def block(index: int) -> BlockSpec:
        at = f"encoder.layers.{index}"
        query, key, value = fused(f"{at}.attn.Wqkv", hidden, hidden, hidden, hidden)
        output = linear(f"{at}.attn.out_proj", hidden, hidden)
        scale = head_dim**-0.5
        heads = AttentionSpec(query, key, value, output, head_dim, scale, rope, is_causal=False)
        gate, up = (linear(f"{at}.mlp.{name}", hidden, ffn) for name in ("fc12", "fc11"))
        mlp = MlpSpec(gate, up, linear(f"{at}.mlp.fc2", ffn, hidden), activation)
        norms = [layer_norm(f"{at}.{name}", hidden, eps) for name in ("norm1", "norm2")]
        return sequential(
            Sublayer(None, heads, sum_norm=norms[0]), Sublayer(None, mlp, sum_norm=norms[1])
        )

    return DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=max_len,
        dtype=read_dtype(config),
        embedding=TensorSpec(
            "embeddings.word_embeddings.weight", (config.integer("vocab_size"), hidden)
        ),
        token_types=TensorSpec(
            "embeddings.token_type_embeddings.weight", (1, hidden), stored_rows=num_types
        ),
        embedding_norm=layer_norm("emb_ln", hidden, eps),
        blocks=tuple(block(index) for index in range(num_layers)),
        final_norm=None,
        head=None,
        optional_prefix="",
        unused=("pooler.", "cls."),
    )


def _original(
    config: ConfigReader,
) -> tuple[int, int, int, int, Activation, float, int, RopeSpec | None]:
    """What the authors' own config says."""
    hidden, num_heads = config.integer("n_embd"), config.integer("n_head")
    for key, only in (
        ("prenorm", False),
        ("parallel_block", False),
        ("qkv_proj_bias", False),
        ("mlp_fc1_bias", False),
        ("mlp_fc2_bias", False),
        ("use_rms_norm", False),
        ("rotary_emb_interleaved", False),
        ("rotary_emb_scale_base", None),
        ("rotary_emb_fraction", 1.0),
        ("causal", False),
        ("scale_attn_by_inverse_layer_idx", False),
    ):
        config.require(key, only)
    config.ignore(
        "use_flash_attn", "use_xentropy", "pad_vocab_size_multiple", "fused_bias_fc",
        "fused_dropout_add_ln", "dense_seq_output", "last_layer_subset", "reorder_and_upcast_attn",
        "scale_attn_weights", "max_trained_positions", "rotary_scaling_factor", "n_positions",
    )  # fmt: skip
    return (
        hidden,
        num_heads,
        config.integer("n_layer"),
        config.integer("n_inner"),
        config.choice("activation_function", _ACTIVATIONS),
        config.number("layer_norm_epsilon", 1e-12),
        config.integer("n_positions"),
        RopeSpec(hidden // num_heads, config.number("rotary_emb_base", 1000.0)),
    )
