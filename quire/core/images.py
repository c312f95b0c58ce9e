"""Images as both planes know them: which a prompt has and where, and what is said of encoding them.

An image is its digest: of the decoded pixels, their shape and the processor's settings. Two images
of one digest are the same for every cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.core.content import Content

IMAGES = "images"
"""Of `StepPlan.orders`: each an `ImageOrder`. Of `StepResult.news`: an `ImageVerdict` on each that
encodes one, in any later step."""


class Image(NamedTuple):
    """An image as the processor left it."""

    digest: bytes
    """32 bytes."""
    pixels: bytes
    """RGB, 8 bits each, [height, width, 3]."""
    height: int
    width: int
    num_tokens: int
    """Places that it takes in the prompt."""
    tiling: tuple[int, ...] = ()
    """Of one in tiles, whose pixels follow one another from top to bottom, the whole image first:
    `quire.models.tiling.Tiling`."""


class PlacedImage(NamedTuple):
    """An image of a prompt."""

    first: int
    """The position of the first of its tokens."""
    image: Image

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first + self.image.num_tokens


class ImageOrder(NamedTuple):
    """To encode an image; without one, to forget it, encoded or not: no row needs it then."""

    digest: bytes
    image: Image | None
    number: int = 0
    """Of an order to encode: which one a verdict is on."""


FORGET_ALL_IMAGES = ImageOrder(b"", None)
"""To forget every image and order: what was ordered before may have been lost on either side."""


class ImageVerdict(NamedTuple):
    """The outcome of an order to encode an image: it is there, or `error` says why it is not."""

    digest: bytes
    error: str | None = None
    number: int = 0


def contents_of(images: Sequence[PlacedImage]) -> tuple[Content, ...]:
    """Return what stands in the places of images."""
    return tuple(Content(each.first, each.end, each.image.digest) for each in images)
