"""LLaVA 1.5 (Liu et al., arXiv:2310.03744): CLIP's tower, a projector of two layers, and a decoder
of another family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.models.clip import declare_clip
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec, MlpSpec, RowsSpec, VisionSpec, linear
from quire.models.dimensions import ACTIVATIONS, read_dtype
from quire.models.llama import declare_llama
from quire.models.mistral import declare_mistral
from quire.models.qwen2 import declare_qwen2

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
_DEFAULTS: dict[object, Mapping[str, object]] = {
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
RENAMED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
"""Older and newer names of the same."""


def declare_llava(config: ConfigReader) -> DecoderSpec:
    """LLaVA 1.5: each image of a fixed size, cut into patches; its rows replace the embeddings of
    as many placeholders."""
    decoder = _decoder(config)
    tower = config.section("vision_config", _CLIP)
    if tower is None:
        raise config.refuse("vision_config", "an object")
    tower.require("model_type", "clip_vision_model")
    layer = config.raw("vision_feature_layer") if config.has("vision_feature_layer") else -2
    if type(layer) is not int:
        raise config.refuse("vision_feature_layer", "one layer's number")
    drops = config.choice(
        "vision_feature_select_strategy", {"default": True, "full": False}, "default"
    )
    rows = declare_clip(tower, "vision_tower", layer)
    at, hidden, text = "multi_modal_projector", rows.hidden_size, decoder.hidden_size
    has_bias = config.flag("multimodal_projector_bias", True)
    projector = MlpSpec(
        None,
        linear(f"{at}.linear_1", hidden, text, has_bias=has_bias),
        linear(f"{at}.linear_2", text, text, has_bias=has_bias),
        config.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
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
        num_leading=1,
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
            "vision_tower.embeddings.position_ids",
            *(f"vision_tower.encoder.layers.{index}." for index in above),
        ),
    )


def _decoder(config: ConfigReader) -> DecoderSpec:
    """Declare the language model, whose section says of which family it is."""
    raw = config.raw("text_config") if config.has("text_config") else None
    family = raw.get("model_type") if isinstance(raw, Mapping) else None
    text = config.section("text_config", _DEFAULTS.get(family, {}))
    if text is None:
        raise config.refuse("text_config", "an object")
    declare = text.choice("model_type", _DECODERS, "llama")
    if config.has("tie_word_embeddings"):
        config.require("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    spec = declare(text)
    at = config if config.has("dtype") or config.has("torch_dtype") else text
    return replace(spec, dtype=read_dtype(at))
