"""From the bytes of an image file to RGB pixels, within limits, whatever the bytes are.

A file is judged by its header before its pixels are allocated. What is wrong with it is one
InvalidParameterError; a decoder's own exceptions never get out.
"""

from __future__ import annotations

import io
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvalidParameterError, NotAvailableError, QuireError
from quire.models.image_processing import MAX_RATIO

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Pixels = NDArray[np.uint8]
"""RGB, [height, width, 3]."""

MAX_PIXELS = 40_000_000
"""Larger than what cameras of phones take as a rule; 120 MB decoded."""
MAX_EDGE = 32_768
MAX_SCANS = 200
"""Of a JPEG file, previews included; cameras and encoders write about ten. Each costs a pass over
all pixels, and takes fifty bytes of a file."""
MAX_READS = 1 << 18
"""Of a decoder from its file. Headers and pieces are read in Python, a microsecond or more each,
and may be a few bytes; a PNG file of 32 MB in pieces of 1 KB takes two thirds of this."""
MAX_RUN_LENGTH_PIXELS = 1 << 20
"""Of a BMP file in run-length encoding, which is decoded in Python: 10 s for `MAX_PIXELS`."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_OF_CAMERAS = "MPO"
"""What Pillow calls a JPEG file that has previews as further frames."""
_START_OF_SCAN = b"\xff\xda"
_WIDE_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")
"""Grey levels of 16 bits, in which Pillow leaves what PNG has."""


_RUN_LENGTH = (1, 2)
"""What BMP calls its run-length encodings."""


class _TooManyReads(Exception):
    """A file of too many parts."""


class _BoundedReads(io.BytesIO):
    """A file that is read so often at most."""

    num_left = MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_left -= 1
        if self.num_left < 0:
            raise _TooManyReads
        return super().read(size)


def pillow() -> ModuleType:
    """Return Pillow's module of images. Raises NotAvailableError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise NotAvailableError(
            "images are decoded by Pillow, which is not installed: pip install 'quire-llm[images]'"
        ) from None
    return Image


def decode(data: bytes, param: str = "image") -> Pixels:
    """Decode a file: turned as its EXIF says, palettes and grey levels made RGB, transparency
    dropped (as transformers does). Raises InvalidParameterError naming `param`."""
    library = pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with library.open(_BoundedReads(data), formats=FORMATS) as image:
                _check_header(image, param)
                if image.format in ("JPEG", _OF_CAMERAS):
                    _check_scans(data, param)
                return _rgb(image, param)
        except QuireError:
            raise
        except _TooManyReads:
            raise _refusal(param, "its header and pixels are in too many parts") from None
        except library.UnidentifiedImageError:
            raise _refusal(
                param,
                f"{len(data)} bytes that are no image of a supported format: {', '.join(FORMATS)}",
            ) from None
        except library.DecompressionBombError:
            raise _refusal(
                param, f"its pixels are too many; at most {MAX_PIXELS:,} are decoded"
            ) from None
        except MemoryError:
            raise _refusal(param, "there is no memory to decode it") from None
        except Exception as error:  # decoders of hostile files raise anything
            raise _refusal(param, f"the file is broken ({type(error).__name__})") from None


def from_object(given: Any, param: str = "image") -> Pixels:
    """Return the pixels of an image of Pillow's, or of an array of 8 bits [height, width] or
    [height, width, 3 or 4]; bytes are a file. Raises InvalidParameterError."""
    if isinstance(given, bytes | bytearray | memoryview):
        return decode(bytes(given), param)
    if isinstance(given, np.ndarray):
        return _from_array(given, param)
    library = pillow()
    if not isinstance(given, library.Image):
        raise InvalidParameterError(
            f"{param}: give an image of PIL, an array of uint8 [height, width, 3], or the bytes of "
            f"a file, not {type(given).__name__}",
            param=param,
        )
    _check_size(given.size, param)
    try:
        return _as_rgb(given, param)
    except QuireError:
        raise
    except Exception as error:  # closed, of a mode without a way to RGB, or of a broken file
        raise _refusal(param, f"Pillow says: {error!s:.80} ({type(error).__name__})") from None


def _from_array(given: NDArray[Any], param: str) -> Pixels:
    is_colour = given.ndim == 3 and given.shape[2] in (3, 4)
    if given.dtype != np.uint8 or not (given.ndim == 2 or is_colour):
        raise InvalidParameterError(
            f"{param}: an array must be of uint8 [height, width] or [height, width, 3 or 4], not "
            f"{given.dtype} {list(given.shape)}",
            param=param,
        )
    _check_size((given.shape[1], given.shape[0]), param)
    rgb = np.repeat(given[:, :, None], 3, axis=2) if given.ndim == 2 else given[:, :, :3]
    return np.ascontiguousarray(rgb)


def _check_header(image: PillowImage, param: str) -> None:
    _check_size(image.size, param)
    if image.info.get("compression") in _RUN_LENGTH and image.format == "BMP":
        num_pixels = image.width * image.height
        if num_pixels > MAX_RUN_LENGTH_PIXELS:
            raise _refusal(
                param,
                f"it is a BMP file of {num_pixels:,} pixels in run-length encoding; at most "
                f"{MAX_RUN_LENGTH_PIXELS:,} are decoded; save it as PNG",
            )
    num_frames = getattr(image, "n_frames", 1)
    if num_frames != 1 and image.format != _OF_CAMERAS:
        raise _refusal(param, f"it is animated ({num_frames} frames); give one of them")


def _check_scans(data: bytes, param: str) -> None:
    """Bound a decoder's passes; in compressed data the marker does not occur."""
    num_scans = data.count(_START_OF_SCAN)
    if num_scans > MAX_SCANS:
        raise _refusal(param, f"it has {num_scans:,} scans; at most {MAX_SCANS} are decoded")


def _check_size(size: tuple[int, int], param: str) -> None:
    width, height = size
    if min(size) < 1 or max(size) > MAX_EDGE or width * height > MAX_PIXELS:
        raise _refusal(
            param, f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded, of at "
            f"most {MAX_EDGE:,} a side"
        )  # fmt: skip
    if max(size) > MAX_RATIO * min(size):
        raise _refusal(
            param, f"it has {width} x {height} pixels; one side may be {MAX_RATIO} times the other"
        )


def _rgb(image: PillowImage, param: str) -> Pixels:
    from PIL import ImageOps

    image.load()
    ImageOps.exif_transpose(image, in_place=True)  # else it copies what needs no turning
    return _as_rgb(image, param)


def _as_rgb(image: PillowImage, param: str) -> Pixels:
    if image.mode == "F":
        raise _refusal(param, "its pixels are floating-point numbers; give 8 or 16 bits")
    if image.mode in _WIDE_MODES:
        grey = np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8)
        return np.ascontiguousarray(np.repeat(grey[:, :, None], 3, axis=2))
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return np.asarray(rgb, np.uint8)  # over bytes of its own


def _refusal(param: str, why: str) -> InvalidParameterError:
    return InvalidParameterError(f"{param}: the image cannot be used: {why}", param=param)
