"""The images of requests, from what names them to what the scheduler and the worker know: records
of `quire.core.images`, and a prompt with a place for each of their rows.

Work on pixels is done in a few threads, each image within a time; a caller waits no longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from quire.common.frozen_record import replace
from quire.core.images import Image, PlacedImage
from quire.errors import InvalidParameterError, UnavailableError
from quire.media.known import ImageName, KnownImages
from quire.media.sources import ImageSource, MediaAccess
from quire.models.declaration import VisionSpec
from quire.models.image_places import bounds_of, num_places
from quire.models.image_processing import ImageProcessing
from quire.models.tiling import tiling_of

if TYPE_CHECKING:
    from quire.media.decoding import Pixels

MAX_PREPARE_S = 60.0
"""Of one image, from the request to the pixels that the tower reads."""
_THREADS = 2
_MAX_PENDING = 64
"""Images that are fetched and decoded at once, or wait for it."""


ReadImage = tuple[Image, ...]
"""An image, and the crops of it that the model reads beside the whole."""


def is_read(content: object) -> TypeGuard[ReadImage]:
    """Whether what names an image is what was read of it before."""
    return isinstance(content, tuple) and all(isinstance(each, Image) for each in content)


class ExpandedPrompt(NamedTuple):
    """A prompt with a token for each row of its images."""

    token_ids: list[int]
    images: tuple[PlacedImage, ...]


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """What a model's images may be."""

    processing: ImageProcessing
    vision: VisionSpec
    max_images: int
    """Of a request."""
    max_places: int
    """Of one image."""
    max_tokens: int
    """Places of all images of a request together."""
    max_bytes: int
    """Of their pixels."""


class ImageReader:
    """Reads the images of one model's requests. For any thread."""

    def __init__(self, limits: ReaderLimits, access: MediaAccess) -> None:
        self.limits = limits
        self._access = access
        self._pool: ThreadPoolExecutor | None = None
        self._room = BoundedSemaphore(_MAX_PENDING)
        self._known = KnownImages()

    def submit(self, source: ImageSource, scope: str = "") -> Future[ReadImage]:
        """Begin to fetch, decode and process an image; `scope` is whose it is, for images that are
        named again. Raises UnavailableError where too many are being read; the future raises
        InvalidParameterError."""
        if not self._room.acquire(blocking=False):
            raise UnavailableError(
                f"{_MAX_PENDING} images are being read already; try again later",
                state="overloaded",
                retry_after_s=1,
            )
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="quire-images")
        future = self._pool.submit(self._read, source, scope)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def read(self, sources: Sequence[ImageSource], scope: str = "") -> list[ReadImage]:
        """Read images one after the other, waiting for each. Raises InvalidParameterError."""
        self.check_count(len(sources), sources[0].param if sources else "image")
        found = []
        for source in sources:
            if is_read(source.content):
                found.append(source.content)
                continue
            future = self.submit(source, scope)
            try:
                found.append(future.result(MAX_PREPARE_S))
            except TimeoutError:
                raise self.too_slow(source) from None
        return found

    def check_count(self, count: int, param: str) -> None:
        """Refuse more images than a request may have."""
        limits = self.limits
        least = bounds_of(limits.vision, limits.processing).min_places
        most = min(limits.max_images, limits.max_tokens // least)
        if count > most:
            raise InvalidParameterError(
                f"{param}: the request has {count} images, and this engine takes at most {most} "
                "(limit_mm_per_prompt, image_cache_memory)",
                param=param,
            )

    @staticmethod
    def too_slow(source: ImageSource) -> InvalidParameterError:
        """Return what a request is answered whose image takes too long."""
        return InvalidParameterError(
            f"{source.param}: the image was not read within {MAX_PREPARE_S:g} s",
            param=source.param,
        )

    def expand(
        self, token_ids: Sequence[int], read: Sequence[ReadImage], param: str = "prompt"
    ) -> ExpandedPrompt:
        """Give each row of the images a place: the n-th placeholder of the prompt is the n-th
        image's, each followed by its crops. Raises InvalidParameterError where their numbers
        differ."""
        images = [image for each in read for image in each]
        placeholder = self.limits.vision.placeholder
        count = token_ids.count(placeholder)
        if count != len(images):
            raise InvalidParameterError(
                f"{param}: it has {count} places for images (token {placeholder}), and "
                f"{len(images)} images are given; write one for each",
                param=param,
            )
        self._check_size(images, param)
        if not images:
            return ExpandedPrompt(list(token_ids), ())
        found, placed, left = list[int](), list[PlacedImage](), iter(images)
        for token_id in token_ids:
            if token_id != placeholder:
                found.append(token_id)
                continue
            image = next(left)
            placed.append(PlacedImage(len(found), image))
            found += [placeholder] * image.num_tokens
        return ExpandedPrompt(found, tuple(placed))

    def _check_size(self, images: Sequence[Image], param: str) -> None:
        """Refuse images that are too large together."""
        places = sum(image.num_tokens for image in images)
        num_bytes = sum(len(image.pixels) for image in images)
        if places > self.limits.max_tokens:
            wrong = f"take {places} places, and this engine keeps at most {self.limits.max_tokens}"
        elif num_bytes > self.limits.max_bytes:
            wrong = f"have {num_bytes:,} bytes of pixels, and at most {self.limits.max_bytes:,} fit"
        else:
            return
        raise InvalidParameterError(
            f"{param}: its images {wrong} (image_cache_memory); give fewer or smaller ones",
            param=param,
        )

    def close(self) -> None:
        """Stop the threads; what they are at ends by itself. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, source: ImageSource, scope: str) -> ReadImage:
        """Read an image, which is known by its name from now on, or find the one that is."""
        name = None
        if source.uuid is not None:
            name = ImageName.of(scope, source.uuid, source.settings)
        if source.content is None and name is not None:
            found = self._known.find(name)
            if found is None:
                raise InvalidParameterError(
                    f"{source.param}: no image is known by the uuid {source.uuid!r} (any more); "
                    "send the image with it",
                    param=source.param,
                )
            return found
        images = self._decoded(source)
        if name is not None:
            self._known.keep(name, images)
        return images

    def _decoded(self, source: ImageSource) -> ReadImage:
        from quire.media.decoding import decode, from_object
        from quire.media.fetching import fetch
        from quire.media.resizing import crops_of, with_settings

        content, param = source.content, source.param
        settings = with_settings(self.limits.processing, source.settings or {}, param)
        pixels = (
            decode(fetch(content, self._access, param), param)
            if isinstance(content, str)
            else from_object(content, param)
        )
        alike = replace(settings, pan_and_scan=None)
        parts = (pixels, *crops_of(pixels, settings))
        return tuple(self._processed(each, alike, param) for each in parts)

    def _processed(self, pixels: Pixels, settings: ImageProcessing, param: str) -> Image:
        from quire.media.resizing import processed

        identity = hashlib.blake2b(repr((pixels.shape, settings)).encode(), digest_size=32)
        identity.update(pixels.data)
        small = processed(pixels, settings, param)
        height, width = small.shape[:2]
        tiling = tuple(tiling_of(pixels.shape[:2], self.limits.vision) or ())
        edges = (height, width) if not tiling else (width, width)
        places = num_places(*edges, tiling, self.limits.vision)
        if places > self.limits.max_places:
            raise InvalidParameterError(
                f"{param}: an image of {pixels.shape[1]} x {pixels.shape[0]} pixels takes {places} "
                f"places, and this engine reads images of at most {self.limits.max_places}; give a "
                "smaller one, or max_pixels in mm_processor_kwargs",
                param=param,
            )
        return Image(identity.digest(), small.tobytes(), height, width, places, tiling)
