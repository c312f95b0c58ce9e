"""Draft heads: small decoders that read the target's hidden states beside tokens, under the names
of the checkpoints that are published of them.

EAGLE (Li et al., arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840), and the layers for further tokens
of DeepSeek V3 (arXiv:2412.19437, section 2.2). A head computes at position `i` with the token at
`i + 1` and the target's state at `i`, and gives the token at `i + 2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.common.frozen_record import FrozenRecord, replace
from quire.errors import ConfigError, UnsupportedModelError
from quire.models.blocks import BlockSpec, Sublayer, sequential
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec, StatesSpec
from quire.models.deepseek_v3 import declare_deepseek_v3
from quire.models.dimensions import ACTIVATIONS, Dimensions, read_dimensions, read_dtype
from quire.models.parts import attention, gated_mlp
from quire.models.rope import RopeSpec, read_rope
from quire.models.tensors import LinearSpec, TensorSpec, linear, rms_norm

_ARCHITECTURES = {
    "eagle": ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": ("LlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "mtp": ("DeepseekV3ForCausalLM",),
}
"""By method. Some heads are published under the name of their blocks' family."""
_EAGLE_KEYS = ("eagle_config", "target_model_type", "num_lookahead_tokens", "pretraining_tp")
_NUM_KEPT = 3
TARGET_IDS, HAS_DRAFT_ID = "d2t", "t2d"
"""Tensors of EAGLE-3: what is added to each draft id to make the target's; which of the target's
there are."""


class HeadSpec(FrozenRecord):
    """A draft head, and what it reads of the target."""

    decoder: DecoderSpec
    """Without an output projection, it takes the target's."""
    kept: tuple[int, ...] = ()
    """Blocks of the target before which its stream is read; none: its states behind the final norm
    are."""
    fuse: LinearSpec | None = None
    """From these streams, one behind the other, to one state."""
    feeds_normed: bool = False
    """Whether its own states are read behind its final norm; else before that."""
    has_target_ids: bool = False
    """Whether its logits are of fewer tokens, which `TARGET_IDS` names."""


def declare_head(method: str, config: Mapping[str, object], target: DecoderSpec) -> HeadSpec:
    """Declare the head that a parsed `config.json` describes; for "mtp", the target's own.

    Raises UnsupportedModelError naming the key and its value, ConfigError where the head is made
    for another target.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    known = _ARCHITECTURES[method]
    if name not in known:
        raise UnsupportedModelError(
            f"method {method!r} takes architectures of {' or '.join(known)}, not "
            f"{repr(names)[:120]}"
        )
    if method == "mtp":
        return _mtp(config, target)
    reader = ConfigReader(config, str(name))
    head = _eagle(reader) if method == "eagle" else _eagle3(reader, target)
    reader.ignore(*_EAGLE_KEYS)
    reader.finish()
    spec = head.decoder
    if spec.hidden_size != target.hidden_size and head.fuse is None:
        raise ConfigError(
            f"the head has hidden_size={spec.hidden_size} and the model {target.hidden_size}: it "
            "is made for another model"
        )
    if spec.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the head has vocab_size={spec.vocab_size} and the model {target.vocab_size}: it is "
            "made for another model"
        )
    return head


def _embedding(name: str, size: Dimensions) -> TensorSpec:
    return TensorSpec(name, (size.vocab, size.hidden), is_optional=True)


def _eagle(config: ConfigReader) -> HeadSpec:
    """EAGLE: a linear layer over both inputs, then blocks, the first without its first norm; the
    target's output projection follows without a norm."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim)
    config.require("add_para_norm", False)
    has_bias = config.flag("bias", True)
    entry = linear("fc", 2 * size.hidden, size.hidden)
    if has_bias:
        entry = replace(entry, bias=TensorSpec("fc.bias", (size.hidden,), is_optional=True))
    config.ignore("tie_word_embeddings")  # the output projection is the target's

    def block(index: int) -> BlockSpec:
        norm = None if index == 0 else "input_layernorm"
        return _block(config, size, rope, f"layers.{index}", norm)

    decoder = DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=size.max_positions,
        dtype=read_dtype(config),
        embedding=_embedding("embed_tokens.weight", size),
        blocks=tuple(map(block, range(size.num_layers))),
        final_norm=None,
        head=None,
        optional_prefix="",
        states=StatesSpec(entry=entry),
        renamed=(("model.", ""),),
    )
    return HeadSpec(decoder)


def _eagle3(config: ConfigReader, target: DecoderSpec) -> HeadSpec:
    """EAGLE-3: three of the target's streams make the state; the block's attention reads the
    embedding and the state, each behind a norm."""
    size = read_dimensions(config)
    config.require("num_hidden_layers", 1)
    rope = read_rope(config, size.head_dim)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    width = config.integer("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise ConfigError(
            f"the head has target_hidden_size={width} and the model hidden_size="
            f"{target.hidden_size}: it is made for another model"
        )
    num_ids = config.integer("draft_vocab_size", size.vocab, maximum=size.vocab)
    config.ignore("tie_word_embeddings", "bias")
    decoder = DecoderSpec(
        architecture=config.architecture,
        max_position_embeddings=size.max_positions,
        dtype=read_dtype(config),
        embedding=_embedding("embed_tokens.weight", size),
        blocks=(_block(config, size, rope, "midlayer", None, num_read=2),),
        final_norm=norm("norm"),
        head=linear("lm_head", size.hidden, num_ids),
        optional_prefix="",
        states=StatesSpec(
            norm("midlayer.input_layernorm"),
            norm("midlayer.hidden_norm"),
            is_stream_normed=config.flag("norm_before_residual", False),
        ),
        unused=(TARGET_IDS, HAS_DRAFT_ID, "fc."),
        renamed=(("model.layers.0.", "midlayer."), ("layers.0.", "midlayer."), ("model.", "")),
    )
    return HeadSpec(
        decoder,
        kept=_kept_blocks(config, len(target.blocks)),
        fuse=linear("fc", _NUM_KEPT * width, size.hidden),
        has_target_ids=num_ids < size.vocab,
    )


def _kept_blocks(config: ConfigReader, num_blocks: int) -> tuple[int, ...]:
    """Return the blocks before which a target's stream is read: near its beginning, in the middle
    and near its end, or as the config says."""
    section = config.section("eagle_config")
    ids: Any = None if section is None else section.raw("eagle_aux_hidden_state_layer_ids")
    if section is not None:
        section.ignore("use_aux_hidden_state")
    if ids is None and config.has("eagle_aux_hidden_state_layer_ids"):
        ids = config.raw("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = [min(2, num_blocks), num_blocks // 2, max(0, num_blocks - _NUM_KEPT)]
    is_fit = isinstance(ids, list) and len(ids) == _NUM_KEPT
    if not is_fit or not all(isinstance(each, int) and 0 <= each <= num_blocks for each in ids):
        raise ConfigError(
            f"the head reads eagle_aux_hidden_state_layer_ids={ids!r}; needed are {_NUM_KEPT} of "
            f"the model's {num_blocks} layers"
        )
    return tuple(ids)


def _block(
    config: ConfigReader,
    size: Dimensions,
    rope: RopeSpec,
    at: str,
    first_norm: str | None,
    num_read: int = 1,
) -> BlockSpec:
    """Declare a block of Llama's whose attention reads rows of so many hidden sizes."""
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6))
    has_bias, width = config.flag("attention_bias", False), num_read * size.hidden
    heads = attention(at, size, rope, has_bias=has_bias, has_output_bias=has_bias)
    query, key, value = (
        replace(part, weight=replace(part.weight, shape=(part.num_outputs, width)))
        for part in (heads.query, heads.key, heads.value)
    )
    heads = replace(heads, query=query, key=key, value=value)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    mlp = gated_mlp(at, size, activation, has_bias=config.flag("mlp_bias", False))
    return sequential(
        Sublayer(None if first_norm is None else norm(f"{at}.{first_norm}"), heads),
        Sublayer(norm(f"{at}.post_attention_layernorm"), mlp),
    )


def _mtp(config: Mapping[str, object], target: DecoderSpec) -> HeadSpec:
    """DeepSeek V3: one more layer of the target's kind; embedding and output projection are the
    target's own."""
    num_layers = len(target.blocks)
    if not config.get("num_nextn_predict_layers"):
        raise ConfigError(
            "method 'mtp' takes models that have a layer for further tokens, and this config has "
            f"num_nextn_predict_layers={config.get('num_nextn_predict_layers')!r}"
        )
    reader = ConfigReader({**config, "num_hidden_layers": num_layers + 1}, target.architecture)
    block = declare_deepseek_v3(reader).blocks[-1]
    at, size = f"model.layers.{num_layers}", target.hidden_size
    norm = partial(rms_norm, size=size, eps=reader.number("rms_norm_eps", 1e-6))
    entry = replace(linear(f"{at}.eh_proj", 2 * size, size), keeps_floats=True)
    decoder = replace(
        target,
        embedding=TensorSpec(f"{at}.embed_tokens.weight", target.embedding.shape, is_optional=True),
        blocks=(block,),
        final_norm=norm(f"{at}.shared_head.norm"),
        head=None,
        states=StatesSpec(norm(f"{at}.enorm"), norm(f"{at}.hnorm"), entry),
        optional_prefix="",
        kept=(),
        unused=("model.", "lm_head."),
    )
    return HeadSpec(decoder, feeds_normed=True)
