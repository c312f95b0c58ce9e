"""The images of HTTP requests, read beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.media.reader import MAX_PREPARE_S, ImageReader, ReadImage
from quire.media.sources import ImageSource
from quire.server.http.errors import unavailable_feature


async def read_images(
    reader: ImageReader | None, sources: Sequence[ImageSource], scope: str = ""
) -> list[ReadImage]:
    """Read images in order, at once; `scope` is whose they are. Raises ApiError 400 where the model
    reads none, and a QuireError for an image that cannot be used."""
    if not sources:
        return []
    if reader is None:
        raise unavailable_feature(
            sources[0].param,
            "image parts (image_url, input_image, image) are not possible: this model takes text "
            "alone",
        )
    reader.check_count(len(sources), sources[0].param)
    futures = []
    try:
        for source in sources:
            futures.append(asyncio.wrap_future(reader.submit(source, scope)))
        found = []
        for source, future in zip(sources, futures, strict=True):
            try:
                found.append(await asyncio.wait_for(future, MAX_PREPARE_S))
            except TimeoutError:
                raise reader.too_slow(source) from None
        return found
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
