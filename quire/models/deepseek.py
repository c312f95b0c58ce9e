"""What DeepSeek's V2 and V3 have in common: latent attention, and mixtures of experts beside shared
ones from some layer on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.common.frozen_record import FrozenRecord, replace
from quire.models.blocks import BlockSpec, ExpertsSpec, LatentAttentionSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, Dimensions
from quire.models.experts import experts
from quire.models.parts import decoder, gated_mlp, pre_norm_block
from quire.models.rope import RopeSpec, read_rope
from quire.models.tensors import LinearSpec, TensorSpec, linear, rms_norm
from quire.program.operations import Routing

LATENT_EPS = 1e-6
"""Of the norms inside attention, whatever `rms_norm_eps` says of the others."""
MAX_EXTRA_LAYERS = 64


class LatentSizes(FrozenRecord):
    """Sizes of latent attention."""

    num_heads: int
    query_rank: int | None
    """Of the vector that queries come of; None: they come of the hidden state."""
    rank: int
    """Of the vector that is kept."""
    nope: int
    """Elements of a head's query and key without a position."""
    rope: int
    """Elements with one, which are rotated."""
    value: int


def read_dimensions(config: ConfigReader) -> tuple[Dimensions, LatentSizes]:
    """Read the sizes, and refuse heads that share keys: latent attention has one for all."""
    num_heads = config.integer("num_attention_heads", maximum=65536)
    config.require("num_key_value_heads", num_heads)
    latent = LatentSizes(
        num_heads,
        config.optional_integer("q_lora_rank", 1536),
        config.integer("kv_lora_rank", 512),
        config.integer("qk_nope_head_dim", 128),
        config.integer("qk_rope_head_dim", 64),
        config.integer("v_head_dim", 128),
    )
    if latent.rope % 2:
        raise config.refuse("qk_rope_head_dim", "even sizes (RoPE pairs elements)")
    config.require("qk_head_dim", latent.nope + latent.rope)
    config.ignore("head_dim")  # that of the rotated part, or of no meaning
    size = Dimensions(
        num_layers=config.integer("num_hidden_layers", maximum=4096),
        hidden=config.integer("hidden_size"),
        ffn=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rope,
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
    )
    return size, latent


def latent_attention(
    at: str,
    hidden: int,
    size: LatentSizes,
    rope: RopeSpec,
    *,
    has_bias: bool,
    is_interleaved: bool,
) -> LatentAttentionSpec:
    """Declare attention under DeepSeek's names; `has_bias` is for what reads and what writes the
    residual stream, but for queries that come straight of it."""
    at = f"{at}.self_attn"
    num_heads, query_inputs = size.num_heads, size.query_rank or hidden
    whole = num_heads * (size.nope + size.value)

    def part(head: int, first: int, count: int, *, is_folded: bool) -> LinearSpec:
        first_row = head * (size.nope + size.value) + first
        name = f"{at}.kv_b_proj.weight"
        weight = TensorSpec(name, (count, size.rank), first_row=first_row, stored_rows=whole)
        return LinearSpec(weight, holds_floats=True, is_folded=is_folded)

    has_vector = size.query_rank is not None
    query = f"{at}.{'q_b_proj' if has_vector else 'q_proj'}"
    return LatentAttentionSpec(
        query_down=linear(f"{at}.q_a_proj", hidden, query_inputs, has_bias=has_bias)
        if has_vector
        else None,
        query_norm=rms_norm(f"{at}.q_a_layernorm", query_inputs, LATENT_EPS)
        if has_vector
        else None,
        query=linear(query, query_inputs, num_heads * (size.nope + size.rope)),
        down=linear(f"{at}.kv_a_proj_with_mqa", hidden, size.rank + size.rope, has_bias=has_bias),
        norm=rms_norm(f"{at}.kv_a_layernorm", size.rank, LATENT_EPS),
        keys=tuple(part(head, 0, size.nope, is_folded=True) for head in range(num_heads)),
        values=tuple(
            part(head, size.nope, size.value, is_folded=False) for head in range(num_heads)
        ),
        output=linear(f"{at}.o_proj", num_heads * size.value, hidden, has_bias=has_bias),
        scale=(size.nope + size.rope) ** -0.5 * rope.score_factor,
        rope=rope,
        is_interleaved=is_interleaved,
    )


def declare_deepseek(
    config: ConfigReader,
    read_routing: Callable[[ConfigReader], Routing],
    *,
    default_dense: int,
    has_choice_bias: bool,
    is_interleaved: bool,
    has_mlp_bias: bool = False,
) -> DecoderSpec:
    """Declare a decoder whose first layers (`first_k_dense_replace`) have MLPs, the others
    mixtures."""
    size, latent = read_dimensions(config)
    rope = read_rope(config, latent.rope)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    has_bias = config.flag("attention_bias", False)
    num_dense = config.integer("first_k_dense_replace", default_dense, minimum=0)
    config.require("moe_layer_freq", 1)
    inner = config.integer("moe_intermediate_size")
    num_shared = config.optional_integer("n_shared_experts", minimum=0) or 0
    routing = read_routing(config)
    config.ignore("ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef")  # training

    def mixture(at: str) -> ExpertsSpec:
        mixture = experts(f"{at}.mlp", size.hidden, inner, routing, activation)
        if has_choice_bias:
            name = f"{at}.mlp.gate.e_score_correction_bias"
            bias = TensorSpec(name, (routing.num_experts,), keeps_float32=True)
            mixture = replace(mixture, choice_bias=bias)
        if not num_shared:
            return mixture
        shared = replace(size, ffn=inner * num_shared)
        at_shared = "mlp.shared_experts"
        mlp = gated_mlp(at, shared, activation, has_bias=has_mlp_bias, module=at_shared)
        return replace(mixture, shared=mlp)

    def block(at: str, index: int) -> BlockSpec:
        heads = latent_attention(
            at, size.hidden, latent, rope, has_bias=has_bias, is_interleaved=is_interleaved
        )
        dense = gated_mlp(at, size, activation, has_bias=has_mlp_bias)
        return pre_norm_block(at, norm, heads, dense if index < num_dense else mixture(at))

    spec = decoder(config, size, norm, block)
    return replace(spec, unused=_extra_layers(config, size.num_layers))


def _extra_layers(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Return where layers lie that predict tokens further ahead, which nothing here computes."""
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    count = max(config.integer(key, 0, minimum=0, maximum=MAX_EXTRA_LAYERS) for key in keys)
    return tuple(f"model.layers.{num_layers + index}." for index in range(count))
