"""Qwen3-VL: the tower of Qwen2-VL with learned positions besides, and rows of some of its blocks
that are added behind the decoder's first ones (DeepStack, arXiv:2406.04334)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from quire.common.frozen_record import replace
from quire.models.clip import VISION_ACTIVATIONS
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec, RowsSpec
from quire.models.qwen2_vl import TOWER, TowerSize, read_decoder, with_tower
from quire.models.qwen3 import declare_qwen3
from quire.models.tensors import TensorSpec, layer_norm

_EPS = 1e-6
_LAYERS = ("linear_fc1", "linear_fc2")
"""Of every MLP of the tower."""
_VISION: Mapping[str, object] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
"""What sections leave out: the defaults of transformers' class."""


def declare_qwen3_vl(config: ConfigReader) -> DecoderSpec:
    """Declare the tower, its mergers, and the decoder."""
    tower = config.section("vision_config", _VISION)
    if tower is None:
        raise config.refuse("vision_config", "an object")
    decoder = read_decoder(config, declare_qwen3)
    if list(decoder.axes) == sorted(decoder.axes):
        raise config.refuse("text_config", "mrope_interleaved=true in its rope_scaling")
    hidden, text = tower.integer("hidden_size"), decoder.hidden_size
    tower.require("out_hidden_size", text)
    size = TowerSize.read(tower, hidden)
    ffn = tower.integer("intermediate_size")
    activation = tower.choice("hidden_act", VISION_ACTIVATIONS, "gelu_pytorch_tanh")
    block = partial(size.plain_block, names=_LAYERS, ffn=ffn, activation=activation)
    vision = size.vision(
        config,
        block,
        layer_norm(f"{TOWER}.merger.norm", hidden, _EPS),
        text,
        merger=_LAYERS,
        bias=TensorSpec(f"{TOWER}.patch_embed.proj.bias", (hidden,)),
    )
    early = _early(tower, size, decoder)
    return with_tower(config, decoder, replace(vision, grid=_grid(tower, hidden), early=early))


def _grid(tower: ConfigReader, hidden: int) -> TensorSpec:
    count = tower.integer("num_position_embeddings", maximum=1 << 24)
    if math.isqrt(count) ** 2 != count:
        raise tower.refuse("num_position_embeddings", "squares of whole numbers")
    return TensorSpec(f"{TOWER}.pos_embed.weight", (count, hidden))


def _early(
    tower: ConfigReader, size: TowerSize, decoder: DecoderSpec
) -> tuple[tuple[int, RowsSpec], ...]:
    """Declare the mergers of single blocks: none of the last one, and fewer than the decoder has
    blocks."""
    blocks, merged = tower.integers("deepstack_visual_indexes", size.depth - 2), []
    if list(blocks) != sorted(set(blocks)) or len(blocks) >= len(decoder.blocks):
        raise tower.refuse(
            "deepstack_visual_indexes", f"ascending, and fewer than {len(decoder.blocks)}"
        )
    for number, block in enumerate(blocks):
        at, width = f"{TOWER}.deepstack_merger_list.{number}", size.hidden * size.merge**2
        norm = layer_norm(f"{at}.norm", width, _EPS)
        layers = size.merger(at, _LAYERS, decoder.hidden_size)
        merged.append((block, RowsSpec(width=width, norm=norm, exit=layers)))
    return tuple(merged)
