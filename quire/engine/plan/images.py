"""Images, as an engine plans them: what is done to pixels, and room for what comes of them."""

from __future__ import annotations

from typing import NamedTuple

from quire.common.numbers import format_bytes, parse_bytes
from quire.config.engine import EngineConfig
from quire.engine.plan.memory import block_bytes
from quire.errors import ConfigError
from quire.models.declaration import DTYPE_BYTES, TOWER_STAGES, DecoderSpec
from quire.models.image_processing import ImageProcessing

DEFAULT_MAX_IMAGES = 16
"""Of a request, where the operator sets no limit."""
_LEAST_BYTES = 64 << 20
_MAX_PIXEL_BYTES = 32 << 20
"""Of all images of a request: they travel in one message, which may have twice as many."""
_KEYS = ("image", "video", "audio")


class ImagePlan(NamedTuple):
    """How images are read."""

    processing: ImageProcessing
    max_per_prompt: int
    max_tokens: int
    """Places of images whose rows are kept."""
    num_bytes: int
    """Of those rows."""
    workspace_bytes: int
    """Of the tower, beside a step's own."""
    reason: str


def plan_images(
    config: EngineConfig, spec: DecoderSpec, processing: ImageProcessing | None, dtype: str
) -> ImagePlan | None:
    """Decide; None for a model that reads no images. Raises ConfigError for what cannot work."""
    vision = spec.vision
    if vision is None:
        return None
    assert processing is not None, "a model that reads images has a processor"
    size = vision.image_size, vision.image_size
    if processing.output != size:
        raise ConfigError(
            f"preprocessor_config.json makes images of {processing.output}, and the tower of "
            f"config.json reads {size} (height, width)"
        )
    if processing.grids != vision.grids:
        raise ConfigError(
            f"image_grid_pinpoints are {processing.grids} in preprocessor_config.json and "
            f"{vision.grids} in config.json; they must be the same"
        )
    row_bytes = spec.hidden_size * DTYPE_BYTES[dtype]
    most = max_per_prompt(config)
    if most * 3 * vision.image_size**2 * vision.max_tiles > _MAX_PIXEL_BYTES:
        raise ConfigError(
            f"limit_mm_per_prompt: {most} images of {size[0]} x {size[1]} pixels are more than a "
            f"request may carry, {format_bytes(_MAX_PIXEL_BYTES)}; lower it"
        )
    image_bytes = vision.max_tokens * row_bytes
    given = config.image_cache_memory
    if given is None:
        num_bytes = max(_LEAST_BYTES, most * image_bytes)
        reason = f"{num_bytes // image_bytes} images of {vision.max_tokens} rows"
    else:
        num_bytes, reason = parse_bytes(given, option="image_cache_memory"), "given"
    if num_bytes < image_bytes:
        raise ConfigError(
            f"image_cache_memory={given!r} holds no image: one takes {format_bytes(image_bytes)}"
        )
    num_rows = vision.num_patches + vision.num_leading
    temporary = TOWER_STAGES * block_bytes(vision.tower.blocks, vision.tower.hidden_size, num_rows)
    pixels = 2 * num_rows * vision.max_tiles * vision.tower.width * DTYPE_BYTES["float32"]
    return ImagePlan(
        processing, most, num_bytes // row_bytes, num_bytes, temporary + pixels, reason
    )


def max_per_prompt(config: EngineConfig) -> int:
    """Return how many images a request may have. Raises ConfigError."""
    limits = config.limit_mm_per_prompt or {}
    for name, value in limits.items():
        if name not in _KEYS or type(value) is not int or value < 0:
            raise ConfigError(
                f"limit_mm_per_prompt={dict(limits)!r}: give whole numbers by kind, such as "
                "{'image': 4}"
            )
    return int(limits.get("image", DEFAULT_MAX_IMAGES))
