"""From RGB pixels to those that a tower reads: padding, resizing, cropping, as a family's processor
has it (`quire.models.image_processing`). Equal to transformers' processors that use Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.common.frozen_record import replace
from quire.errors import InvalidParameterError, UnsupportedModelError
from quire.media.decoding import MAX_PIXELS, Pixels, pillow
from quire.models.image_processing import ImageProcessing, read_pan_and_scan
from quire.models.tiling import best_size


def processed(pixels: Pixels, settings: ImageProcessing, param: str = "image") -> Pixels:
    """Return the pixels [height, width, 3] behind the processor, before they are scaled. Raises
    InvalidParameterError for an image that would become too large on the way."""
    if settings.grids:
        return _tiles(pixels, settings, param)
    if settings.pixels is not None:
        target = own_size(pixels.shape[:2], settings.pixels, settings.place_size)
        return _resized(pixels, target, settings.resample, param)
    if settings.pads_to_square:
        pixels = _squared(pixels, settings.mean, param)
    if settings.size is not None:
        pixels = _resized(pixels, _target(pixels, settings.size), settings.resample, param)
    return np.ascontiguousarray(
        pixels if settings.crop is None else _cropped(pixels, settings.crop)
    )


def _tiles(pixels: Pixels, settings: ImageProcessing, param: str) -> Pixels:
    """The whole image as a square, then the tiles of the best grid, from top to bottom."""
    assert settings.crop is not None
    edge = settings.crop[0]
    height, width = best_size(pixels.shape[:2], settings.grids)
    scales = width / pixels.shape[1], height / pixels.shape[0]
    fitting = (
        (min(math.ceil(pixels.shape[0] * scales[0]), height), width)
        if scales[0] < scales[1]
        else (height, min(math.ceil(pixels.shape[1] * scales[1]), width))
    )
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - fitting[0]) // 2, (width - fitting[1]) // 2
    canvas[top : top + fitting[0], left : left + fitting[1]] = _resized(
        pixels, fitting, settings.resample, param
    )
    grid = canvas.reshape(height // edge, edge, width // edge, edge, 3).transpose(0, 2, 1, 3, 4)
    whole = _resized(pixels, settings.crop, settings.resample, param)
    return np.concatenate([whole, grid.reshape(-1, edge, 3)])


def with_settings(
    settings: ImageProcessing, given: Mapping[str, Any], param: str = "image"
) -> ImageProcessing:
    """Return settings with those of a request, its `mm_processor_kwargs`: `min_pixels` and
    `max_pixels`, or `do_pan_and_scan` and what belongs to it. Raises InvalidParameterError for
    others, and for what the model's images do not have."""
    if not given:
        return settings
    own: Mapping[str, Any] = {}
    if settings.pixels is not None:
        own = dict(zip(("min_pixels", "max_pixels"), settings.pixels, strict=True))
    elif settings.pan_and_scan is not None:
        own = settings.pan_and_scan.as_given()
    if not set(given) <= set(own):
        raise InvalidParameterError(
            f"{param}: mm_processor_kwargs has {sorted(map(str, given))}; of a request this model "
            f"takes {' and '.join(own) or 'nothing'}",
            param="mm_processor_kwargs",
        )
    if settings.pan_and_scan is not None:
        try:
            return replace(settings, pan_and_scan=read_pan_and_scan({**own, **given}))
        except UnsupportedModelError as error:
            message = str(error).replace("preprocessor_config.json", "mm_processor_kwargs")
            raise InvalidParameterError(
                f"{param}: {message}", param="mm_processor_kwargs"
            ) from error
    least, most = (given.get(name, value) for name, value in own.items())
    if type(least) is not int or type(most) is not int or not 1 <= least <= most <= MAX_PIXELS:
        raise InvalidParameterError(
            f"{param}: mm_processor_kwargs leaves min_pixels={least!r} and max_pixels={most!r}; "
            f"give whole numbers from 1 to {MAX_PIXELS}, the first at most the second",
            param="mm_processor_kwargs",
        )
    return replace(settings, pixels=(least, most))


def crops_of(pixels: Pixels, settings: ImageProcessing) -> list[Pixels]:
    """Return the parts of an image [height, width, 3] that are read beside the whole, from left to
    right or from top to bottom; none where pan and scan is off or finds the image not narrow
    enough. Equal to transformers' Gemma 3 processor."""
    pan = settings.pan_and_scan
    if pan is None or not pan.is_on:
        return []
    height, width = pixels.shape[:2]
    longer, shorter = max(height, width), min(height, width)
    if longer / shorter < pan.min_ratio:
        return []
    count = min(longer // pan.min_crop_size, math.floor(longer / shorter + 0.5))
    count = min(pan.max_num_crops, max(2, count))
    edge = math.ceil(longer / count)
    if min(edge, shorter) < pan.min_crop_size:
        return []
    spans = [slice(edge * n, edge * (n + 1)) for n in range(count) if edge * n < longer]
    found = [pixels[:, span] if width >= height else pixels[span] for span in spans]
    return [np.ascontiguousarray(each) for each in found]


def own_size(size: tuple[int, ...], limits: tuple[int, int], unit: int) -> tuple[int, int]:
    """Return height and width as multiples of `unit`, of at least and at most so many pixels, in
    nearly the same ratio (arXiv:2409.12191, section 2.1; rounded as transformers does)."""
    height, width = size
    least, most = limits
    rows, columns = round(height / unit), round(width / unit)
    area = rows * columns * unit**2
    if area > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(edge / scale / unit)) for edge in size)
    elif area < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(edge * scale / unit) for edge in size)
    return rows * unit, columns * unit


def _target(pixels: Pixels, size: tuple[int, int] | int) -> tuple[int, int]:
    """Height and width to resize to; the longer edge is rounded down."""
    if isinstance(size, tuple):
        return size
    height, width = pixels.shape[:2]
    longer = size * max(height, width) // min(height, width)
    return (longer, size) if height > width else (size, longer)


def _resized(pixels: Pixels, target: tuple[int, int], resample: int, param: str) -> Pixels:
    height, width = target
    if height * width > MAX_PIXELS:
        raise InvalidParameterError(
            f"{param}: an image of {pixels.shape[1]} x {pixels.shape[0]} would be resized to "
            f"{width} x {height} pixels; give one that is closer to a square",
            param=param,
        )
    resized = pillow().fromarray(pixels).resize((width, height), resample=resample)
    return np.asarray(resized)


def _squared(pixels: Pixels, mean: tuple[float, ...], param: str) -> Pixels:
    height, width = pixels.shape[:2]
    edge = max(height, width)
    if height == width:
        return pixels
    if edge * edge > MAX_PIXELS:
        raise InvalidParameterError(
            f"{param}: an image of {width} x {height} would be padded to a square of more than "
            f"{MAX_PIXELS:,} pixels; give a smaller one",
            param=param,
        )
    square = np.empty((edge, edge, 3), np.uint8)
    square[:] = [int(each * 255) for each in mean]
    top, left = (edge - height) // 2, (edge - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def _cropped(pixels: Pixels, crop: tuple[int, int]) -> Pixels:
    """Cut out the centre; what lies outside the image is black."""
    out = np.zeros((*crop, 3), np.uint8)
    spans = [_span(have, want) for have, want in zip(pixels.shape[:2], crop, strict=True)]
    (from_row, to_row, rows), (from_column, to_column, columns) = spans
    out[to_row : to_row + rows, to_column : to_column + columns] = pixels[
        from_row : from_row + rows, from_column : from_column + columns
    ]
    return out


def _span(have: int, want: int) -> tuple[int, int, int]:
    """Along one side: where to read, where to write, how many."""
    first = (have - want) // 2
    if first >= 0:
        return first, 0, want
    # rounded as transformers does: padded to the wanted size around the image, then cut
    padding = -(-(want - have) // 2)
    return 0, min(padding, want - have), have
