"""Images, as an engine plans them: what is done to pixels, and room for what comes of them."""

from __future__ import annotations

from typing import NamedTuple

from quire.common.numbers import format_bytes, parse_bytes
from quire.config.engine import EngineConfig
from quire.config.limits import SchedulerLimits
from quire.engine.plan.memory import block_bytes
from quire.errors import ConfigError
from quire.models.declaration import DecoderSpec, VisionSpec
from quire.models.image_places import ImageBounds, bounds_of, tower_stages
from quire.models.image_processing import ImageProcessing
from quire.models.tensors import DTYPE_BYTES

DEFAULT_MAX_IMAGES = 16
"""Of a request, where the operator sets no limit."""
_LEAST_BYTES = 64 << 20
_MAX_TOWER_BYTES = 2 << 30
"""Of the tower's values for one image, where the operator does not say how large it may be: of
Qwen2-VL's, 2.3 million pixels."""
MAX_PIXEL_BYTES = 32 << 20
"""Of all images of a request: they travel in one message, which may have twice as many."""
_KEYS = ("image", "video", "audio")


class ImagePlan(NamedTuple):
    """How images are read."""

    processing: ImageProcessing
    max_per_prompt: int
    max_places: int
    """Of an image."""
    max_tokens: int
    """Places of images whose rows are kept."""
    num_bytes: int
    """Of those rows."""
    workspace_bytes: int
    """Of the tower, beside a step's own."""
    reason: str


def plan_images(
    config: EngineConfig,
    spec: DecoderSpec,
    processing: ImageProcessing | None,
    dtype: str,
    longest: int,
) -> ImagePlan:
    """Decide for a model that reads images, and prompts of at most `longest` tokens. Raises
    ConfigError for what cannot work."""
    vision = spec.vision
    assert vision is not None and processing is not None, "a model that reads images has both"
    _check_fit(vision, processing)
    bounds, most = bounds_of(vision, processing), max_per_prompt(config)
    if vision.image_size is None:
        bounds = _limited(config, vision, bounds, longest)
    elif most * 3 * bounds.max_pixels > MAX_PIXEL_BYTES:
        if "image" in (config.limit_mm_per_prompt or {}):
            raise ConfigError(
                f"limit_mm_per_prompt: {most} images of {vision.image_size} x {vision.image_size} "
                f"pixels are more than a request may carry, {format_bytes(MAX_PIXEL_BYTES)}; lower "
                "it"
            )
        most = MAX_PIXEL_BYTES // (3 * bounds.max_pixels)
    row_bytes = vision.num_projectors * spec.hidden_size * DTYPE_BYTES[dtype]
    image_bytes = bounds.max_places * row_bytes
    given = config.image_cache_memory
    if given is None:
        num_bytes = max(_LEAST_BYTES, min(most * image_bytes, longest * row_bytes))
        reason = f"{num_bytes // image_bytes} images of {bounds.max_places} rows"
    else:
        num_bytes, reason = parse_bytes(given, option="image_cache_memory"), "given"
    if num_bytes < image_bytes:
        raise ConfigError(
            f"image_cache_memory={given!r} holds no image: one takes {format_bytes(image_bytes)}"
        )
    num_patches = bounds.max_pixels // vision.patch_size**2
    pixel_bytes = 2 * num_patches * vision.tower.width * DTYPE_BYTES["float32"]
    workspace_bytes = bounds.max_rows * _row_bytes(vision) + pixel_bytes
    return ImagePlan(
        processing, most, bounds.max_places, num_bytes // row_bytes, num_bytes, workspace_bytes,
        reason,
    )  # fmt: skip


def _check_fit(vision: VisionSpec, processing: ImageProcessing) -> None:
    """Refuse a processor that makes other images than the tower reads."""
    if vision.image_size is None:
        patch = vision.patch_size, vision.merge, vision.num_frames
        if processing.pixels is None or processing.patch != patch:
            raise ConfigError(
                "preprocessor_config.json has patch_size, merge_size and temporal_patch_size "
                f"{processing.patch}, and the tower of config.json reads {patch}"
            )
        return
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


def check_undivided(vision: VisionSpec, places: int, limits: SchedulerLimits) -> None:
    """Refuse limits under which an image of so many places, whose tokens see one another both ways,
    finds no room in a step: beside decodes, and beside short prompts, which may take half of it
    (`quire.core.scheduler.prompts`). Raises ConfigError."""
    if not vision.sees_whole or not limits.enable_chunked_prefill:
        return
    least = 2 * places + limits.max_num_seqs
    if limits.max_num_batched_tokens < least:
        raise ConfigError(
            f"max_num_batched_tokens={limits.max_num_batched_tokens}: a step computes "
            f"all {places} places of an image together; give at least {least}, twice that and one "
            f"for each of max_num_seqs={limits.max_num_seqs}"
        )


def _limited(
    config: EngineConfig, vision: VisionSpec, bounds: ImageBounds, longest: int
) -> ImageBounds:
    """Return the bounds of images that keep their own sizes: what the operator says, or what the
    tower has memory for."""
    places = min(bounds.max_places, longest)
    if "max_pixels" not in (config.mm_processor_kwargs or {}):
        places = min(places, _MAX_TOWER_BYTES // (vision.merge**2 * _row_bytes(vision)))
    places = max(places, bounds.min_places)
    return bounds._replace(
        max_places=places,
        max_rows=places * vision.merge**2,
        max_pixels=places * vision.place_size**2,
    )


def _row_bytes(vision: VisionSpec) -> int:
    """Memory of the tower for each of its rows."""
    return len(tower_stages(vision)) * block_bytes(vision.tower.blocks, vision.tower.hidden_size, 1)


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
