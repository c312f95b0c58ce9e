"""How an image becomes places of a prompt: their number, the largest that there may be, and the
pieces that a tower is computed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.models.declaration import VisionSpec
from quire.models.image_processing import MAX_RATIO, ImageProcessing

_TOWER_STAGES = 4
"""As a rule. Each keeps memory for its values."""


class ImageBounds(NamedTuple):
    """What an image is at least and at most, behind the processor."""

    min_places: int
    max_places: int
    max_rows: int
    """Of the tower at once."""
    max_pixels: int
    """Of all tiles."""


def bounds_of(vision: VisionSpec, processing: ImageProcessing) -> ImageBounds:
    """Return the bounds of a model's images."""
    if vision.image_size is None:
        return _own_bounds(vision, processing)
    edge, side = vision.image_size, vision.image_size // vision.patch_size
    whole = num_places(edge, edge, (), vision)
    tiles = max((height * width // edge**2 for height, width in vision.grids), default=0)
    rows = ((height // edge * side, width // edge * side) for height, width in vision.grids)
    added = max((height * (width + 1) for height, width in rows), default=0)
    num_rows = side**2 + vision.num_leading
    return ImageBounds(whole, whole + added, num_rows, (1 + tiles) * edge**2)


def _own_bounds(vision: VisionSpec, processing: ImageProcessing) -> ImageBounds:
    """Of images that keep sizes of their own. Narrow ones exceed what the processor says by as much
    as rounding to whole places adds."""
    assert processing.pixels is not None
    least, most = processing.pixels
    edge, longest = vision.place_size, math.isqrt(MAX_RATIO) + 1
    max_pixels = most + edge * longest * (math.isqrt(most) + 1) + edge**2
    places = max_pixels // edge**2
    min_places = max(1, least // edge**2)
    return ImageBounds(min_places, places, places * vision.merge**2, max_pixels)


def num_places(height: int, width: int, tiling: Sequence[int], vision: VisionSpec) -> int:
    """Return the places that an image of this size takes; of one in tiles, whose size is the
    whole's: of the whole image, then of each row of patches, with one that ends it."""
    rows, columns = height // vision.patch_size, width // vision.patch_size
    edge = vision.merge * vision.pool
    whole = rows // edge * (columns // edge)
    whole += 0 if vision.drops_leading else vision.num_leading
    if not tiling:
        return whole
    *_, shown_rows, shown_columns = tiling
    return whole + shown_rows * (shown_columns + 1)


def tower_stages(vision: VisionSpec) -> tuple[range, ...]:
    """Return the tower's blocks in pieces that are computed by themselves; those of one all attend
    to the same."""
    count = len(vision.tower.blocks)
    size, found, first = -(-count // _TOWER_STAGES) or 1, list[range](), 0
    ends = {block + 1 for block, _ in vision.early}
    if vision.grid is not None:
        found.append(range(0))  # the entry alone
    for end in range(1, count + 1):
        is_other = end < count and is_whole(vision, end) != is_whole(vision, first)
        if end == count or end in ends or is_other or end - first == size:
            found.append(range(first, end))
            first = end
    return tuple(found) or (range(0),)


def is_whole(vision: VisionSpec, block: int) -> bool:
    """Return whether a block attends to all patches."""
    return vision.window is None or block in vision.whole_blocks


def default_processing(vision: VisionSpec) -> dict[str, Any]:
    """Return what `preprocessor_config.json` may say of a model that has none."""
    edge = vision.image_size
    if edge is not None:
        return {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": vision.merge,
        "temporal_patch_size": vision.num_frames,
    }
