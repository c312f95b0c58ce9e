"""Images in tiles, as LLaVA-NeXT has them ("anyres", github.com/LLaVA-VL/LLaVA-NeXT): which grid an
image gets, and which of the grid's patches stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.models.declaration import VisionSpec

Size = tuple[int, int]
"""(height, width)"""


class Tiling(NamedTuple):
    """A grid of tiles, and the patches of it that show the image, not what was added around it."""

    rows: int
    columns: int
    top: int
    left: int
    height: int
    width: int


def best_size(size: Size, sizes: Sequence[Size]) -> Size:
    """Return the size that keeps most of an image's pixels, and among those wastes least."""
    height, width = size

    def merit(target: Size) -> tuple[int, int]:
        scale = min(target[1] / width, target[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - target[0] * target[1]

    return max(sizes, key=merit)


def tiling_of(size: Size, vision: VisionSpec) -> Tiling | None:
    """Return the tiling of an image; None for a model that has none."""
    if not vision.grids:
        return None
    assert vision.image_size is not None
    height, width = size
    target = best_size(size, vision.grids)
    rows, columns = target[0] // vision.image_size, target[1] // vision.image_size
    side = vision.image_size // vision.patch_size
    most_rows, most_columns = rows * side, columns * side
    top = left = 0
    if width / height > most_columns / most_rows:
        top = (most_rows - int(round(height * (most_columns / width), 7))) // 2
    else:
        left = (most_columns - int(round(width * (most_rows / height), 7))) // 2
    return Tiling(rows, columns, top, left, most_rows - 2 * top, most_columns - 2 * left)
