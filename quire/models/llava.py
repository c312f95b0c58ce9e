"""LLaVA 1.5 (Liu et al., arXiv:2310.03744): the tower of CLIP or SigLIP, a projector of two layers,
and a decoder of another family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.common.frozen_record import replace
from quire.models.clip import declare_clip
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec, RowsSpec, VisionSpec
from quire.models.dimensions import ACTIVATIONS, read_dtype
from quire.models.llama import declare_llama
from quire.models.mistral import declare_mistral
from quire.models.parts import plain_mlp
from quire.models.qwen2 import declare_qwen2
from quire.models.siglip import declare_siglip
from quire.models.tensors import TensorSpec

_DECODERS: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "llama": declare_llama,
    "mistral": declare_mistral,
    "qwen2": declare_qwen2,
}
_LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_DEFAULTS: dict[str | None, Mapping[str, object]] = {
    None: _LLAMA,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
}
"""What the sections of published checkpoints leave out: the defaults of transformers' classes."""
_CLIP: Mapping[str, object] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_CLIP_FAMILY = "clip_vision_model"
_TOWERS = {_CLIP_FAMILY: declare_clip, "siglip_vision_model": declare_siglip}
_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
RENAMED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.image_newline", "image_newline"),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
"""Older and newer names of the same."""


def declare_llava(config: ConfigReader) -> DecoderSpec:
    """LLaVA 1.5: each image of a fixed size, cut into patches; its rows replace the embeddings of
    as many placeholders."""
    decoder = _decoder(config)
    family = _family(config, "vision_config") or _CLIP_FAMILY
    tower = config.section("vision_config", _CLIP if family == _CLIP_FAMILY else {})
    if tower is None:
        raise config.refuse("vision_config", "an object")
    declare_tower = tower.choice("model_type", _TOWERS, _CLIP_FAMILY)
    has_class_token = declare_tower is declare_clip
    layer = config.raw("vision_feature_layer") if config.has("vision_feature_layer") else -2
    if type(layer) is not int:
        raise config.refuse("vision_feature_layer", "one layer's number")
    drops = config.choice(
        "vision_feature_select_strategy", {"default": True, "full": False}, "default"
    )
    if drops and not has_class_token:
        raise config.refuse("vision_feature_select_strategy", "'full': there is no class token")
    rows = declare_tower(tower, "vision_tower", layer)
    at, hidden, text = "multi_modal_projector", rows.hidden_size, decoder.hidden_size
    has_bias = config.flag("multimodal_projector_bias", True)
    projector = plain_mlp(
        (f"{at}.linear_1", f"{at}.linear_2"),
        (hidden, text, text),
        config.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        has_bias=has_bias,
    )
    config.ignore("ignore_index", "image_seq_length", "vocab_size", "image_grid_pinpoints")
    placeholder = config.integer("image_token_index", 32000, minimum=0)
    if placeholder >= decoder.vocab_size:
        raise config.refuse("image_token_index", f"a token below {decoder.vocab_size}")
    vision = VisionSpec(
        placeholder=placeholder,
        patch_size=tower.integer("patch_size"),
        image_size=tower.integer("image_size"),
        tower=rows,
        num_leading=int(has_class_token),
        drops_leading=drops,
        projector=RowsSpec(width=hidden, exit=projector),
    )
    above = range(len(rows.blocks), tower.integer("num_hidden_layers"))
    return replace(
        decoder,
        vision=vision,
        renamed=RENAMED,
        optional_prefix="",
        unused=(
            "vision_tower.post_layernorm.",
            "vision_tower.head.",
            "vision_tower.embeddings.position_ids",
            *(f"vision_tower.encoder.layers.{index}." for index in above),
        ),
    )


def declare_llava_next(config: ConfigReader) -> DecoderSpec:
    """LLaVA-NeXT, or 1.6: an image is read whole and in tiles of the grid that suits it best."""
    spec = declare_llava(config)
    assert spec.vision is not None
    config.require("use_image_newline_parameter", True)
    given = config.raw("image_grid_pinpoints") if config.has("image_grid_pinpoints") else _GRIDS
    edge = spec.vision.image_size
    assert edge is not None
    are_pairs = isinstance(given, list | tuple) and all(
        isinstance(each, list | tuple)
        and len(each) == 2
        and all(type(size) is int and size > 0 and size % edge == 0 for size in each)
        for each in given
    )
    if not given or not are_pairs or (not spec.vision.drops_leading and spec.vision.num_leading):
        raise config.refuse("image_grid_pinpoints", f"pairs of multiples of image_size={edge}")
    assert isinstance(given, list | tuple)
    vision = replace(
        spec.vision,
        grids=tuple((each[0], each[1]) for each in given),
        newline=TensorSpec("image_newline", (spec.hidden_size,)),
    )
    return replace(spec, vision=vision)


def _family(config: ConfigReader, key: str) -> str | None:
    """Return what a section says that it is of."""
    raw = config.raw(key) if config.has(key) else None
    family = raw.get("model_type") if isinstance(raw, Mapping) else None
    return family if isinstance(family, str) else None


def _decoder(config: ConfigReader) -> DecoderSpec:
    """Declare the language model, whose section says of which family it is."""
    text = config.section("text_config", _DEFAULTS.get(_family(config, "text_config"), {}))
    if text is None:
        raise config.refuse("text_config", "an object")
    declare = text.choice("model_type", _DECODERS, "llama")
    if config.has("tie_word_embeddings"):
        config.require("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    spec = declare(text)
    at = config if config.has("dtype") or config.has("torch_dtype") else text
    return replace(spec, dtype=read_dtype(at))
