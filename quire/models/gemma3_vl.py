"""Gemma 3 with images (arXiv:2503.19786): SigLIP's tower, whose rows are averaged square by square,
and a decoder that attends to all places of an image from each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quire.common.frozen_record import replace
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec, RowsSpec, VisionSpec
from quire.models.dimensions import read_dtype
from quire.models.gemma3 import declare_gemma3
from quire.models.llava import RENAMED
from quire.models.siglip import declare_siglip
from quire.models.tensors import LinearSpec, TensorSpec, layer_norm, rms_norm

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"
_TEXT: Mapping[str, object] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""What the section of published checkpoints leaves out: the defaults of transformers' class."""


def declare_gemma3_vl(config: ConfigReader) -> DecoderSpec:
    """Declare tower, projector and decoder."""
    text = config.section("text_config", _TEXT)
    tower = config.section("vision_config")
    if text is None or tower is None:
        raise config.refuse("text_config" if text is None else "vision_config", "an object")
    text.require("use_bidirectional_attention", False)
    decoder = declare_gemma3(text)
    if config.has("tie_word_embeddings"):
        config.require("tie_word_embeddings", text.flag("tie_word_embeddings", True))
    tower.require("model_type", "siglip_vision_model")
    eps = tower.number("layer_norm_eps", 1e-6)
    rows = declare_siglip(tower, _TOWER, -1)
    hidden = rows.hidden_size
    image_size, patch_size = tower.integer("image_size"), tower.integer("patch_size")
    side, num_places = image_size // patch_size, config.integer("mm_tokens_per_image", 256)
    pool = side // max(1, math.isqrt(num_places))
    if pool < 1 or (side // pool) ** 2 != num_places:
        raise config.refuse("mm_tokens_per_image", f"a square that divides {side} x {side} patches")
    tokens = [
        config.integer(key, default, minimum=0)
        for key, default in (
            ("image_token_index", 262144),
            ("boi_token_index", 255999),
            ("eoi_token_index", 256000),
        )
    ]
    if max(tokens) >= decoder.vocab_size:
        raise config.refuse("image_token_index", f"a token below {decoder.vocab_size}")
    placeholder, before, behind = tokens
    weight = TensorSpec(
        f"{_PROJECTOR}.mm_input_projection_weight",
        (decoder.hidden_size, hidden),
        is_transposed=True,
    )
    norm = rms_norm(f"{_PROJECTOR}.mm_soft_emb_norm", hidden, eps, weight_offset=1.0)
    vision = VisionSpec(
        placeholder=placeholder,
        patch_size=patch_size,
        image_size=image_size,
        tower=replace(rows, final_norm=layer_norm(f"{_TOWER}.post_layernorm", hidden, eps)),
        projector=RowsSpec(width=hidden, norm=norm, exit=LinearSpec(weight)),
        pool=pool,
        sees_whole=True,
        frame=(before, behind),
    )
    at = config if config.has("dtype") or config.has("torch_dtype") else text
    return replace(
        decoder,
        dtype=read_dtype(at),
        vision=vision,
        renamed=RENAMED,
        optional_prefix="",
        unused=(f"{_TOWER}.head.", f"{_TOWER}.embeddings.position_ids"),
    )
