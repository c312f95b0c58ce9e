"""What reads the images of an engine's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.plan.engine_plan import EnginePlan
    from quire.media.reader import ImageReader


def image_reader(plan: EnginePlan) -> ImageReader | None:
    """Make it; None for a model that reads no images."""
    images, vision, config = plan.images, plan.spec.vision, plan.config
    if images is None or vision is None:
        return None
    from quire.engine.plan.images import MAX_PIXEL_BYTES
    from quire.media.reader import ImageReader, ReaderLimits
    from quire.media.sources import MediaAccess

    limits = ReaderLimits(
        images.processing,
        vision,
        images.max_per_prompt,
        images.max_places,
        images.max_tokens,
        MAX_PIXEL_BYTES,
    )
    access = MediaAccess.of_options(config.allowed_media_domains, config.allowed_local_media_path)
    return ImageReader(limits, access)
