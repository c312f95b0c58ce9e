"""How a family brings images into the form that its tower reads: the settings of
`preprocessor_config.json`, read strictly.

Owns no pixel: `quire.media.resizing` resizes and crops by these settings, `quire.nn.vision` scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from typing import Any

from quire.common.frozen_record import FrozenRecord
from quire.errors import UnsupportedModelError

MAX_RATIO = 200
"""Of an image's longer edge to the shorter one."""
_MAX_EDGE = 1 << 14
_MAX_CROPS = 64
_MAX_PIXELS = 1 << 25
_BILINEAR = 2
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3
_FILTERS = range(6)
_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "CLIP": {},
    "Llava": {},
    "LlavaNext": {
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    },
    "Siglip": {
        "size": {"height": 224, "width": 224},
        "do_center_crop": False,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
    "Gemma3": {
        "size": {"height": 224, "width": 224},
        "do_center_crop": False,
        "resample": _BILINEAR,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
}
"""By the kind of the processor, what differs from CLIP's."""
_KNOWN = frozenset(
    {
        "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale",
        "rescale_factor", "do_normalize", "image_mean", "image_std", "do_convert_rgb", "do_pad",
        "default_to_square", "image_processor_type", "feature_extractor_type", "processor_class",
        "data_format", "input_data_format", "device", "return_tensors", "disable_grouping",
        "image_seq_length", "pad_size", "image_grid_pinpoints",
    }
)  # fmt: skip
_PAN_AND_SCAN = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""Gemma 3's, and what they are where nothing is said."""
_OWN_SIZES: Mapping[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "do_center_crop": False,
    "do_resize": True,
}
"""Of processors that leave each image a size of its own: Qwen2-VL's."""


class PanAndScan(FrozenRecord):
    """Crops of narrow images, which the model reads beside the whole."""

    is_on: bool
    min_crop_size: int
    """Of a crop's shorter edge, in pixels of the image; with smaller ones there are none."""
    max_num_crops: int
    min_ratio: float
    """Of the longer edge to the shorter one."""

    def as_given(self) -> dict[str, Any]:
        """Return the settings by the names that processors give them."""
        values = self.is_on, self.min_crop_size, self.max_num_crops, self.min_ratio
        return dict(zip(_PAN_AND_SCAN, values, strict=True))


class ImageProcessing(FrozenRecord):
    """What is done to an image's RGB pixels, in this order."""

    pads_to_square: bool
    """With the mean colour."""
    size: tuple[int, int] | int | None
    """(height, width), or the shorter edge; None: as it is."""
    resample: int
    """Pillow's number of the filter."""
    crop: tuple[int, int] | None
    """(height, width), around the centre; what is missing is black."""
    scale: float
    mean: tuple[float, float, float]
    """Subtracted from each channel of the scaled pixels."""
    std: tuple[float, float, float]
    """Divides what is left."""
    grids: tuple[tuple[int, int], ...] = ()
    """Heights and widths, of which the best is filled and cut into tiles; all else is done to each
    tile, and to the whole image, which is made square."""
    pixels: tuple[int, int] | None = None
    """Of images that keep a size of their own, near which they are brought to multiples of
    `place_size`: at least and at most so many, as `quire.media.resizing` has it."""
    patch: tuple[int, int, int] = (1, 1, 1)
    """Of such images: pixels along an edge, patches along that of a place, pictures of a film."""
    pan_and_scan: PanAndScan | None = None
    """None: the family has none."""

    @property
    def place_size(self) -> int:
        """Of images that keep a size of their own, what divides height and width."""
        return self.patch[0] * self.patch[1]

    @property
    def output(self) -> tuple[int, int] | None:
        """Height and width of every image behind it; None where they depend on the image."""
        return self.crop or (self.size if isinstance(self.size, tuple) else None)


def read_image_processing(config: Mapping[str, Any]) -> ImageProcessing:
    """Read the settings of a processor of CLIP's, SigLIP's or Qwen2-VL's kind. Raises
    UnsupportedModelError naming the key, or the kind, that is not implemented."""
    kind = config.get("image_processor_type") or config.get("feature_extractor_type") or "CLIP"
    family = re.sub("(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", str(kind))
    if family == "Qwen2VL":
        return _with_own_sizes(config)
    if family not in _DEFAULTS:
        raise _refusal("image_processor_type", kind, ", ".join(sorted([*_DEFAULTS, "Qwen2VL"])))
    pans = _PAN_AND_SCAN if family == "Gemma3" else {}
    config = _with_defaults(config, {**_DEFAULTS[family], **pans}, _KNOWN | set(pans))
    size = _size(config, "size", {"shortest_edge": 224})
    crop = _size(config, "crop_size", {"height": 224, "width": 224})
    if isinstance(crop, int):
        crop = (crop, crop)
    grids = tuple(_grid(each) for each in config.get("image_grid_pinpoints") or ())
    if grids and (crop != (size, size) or not config.get("do_resize", True)):
        raise _refusal("crop_size", config.get("crop_size"), "the size, where there are tiles")
    return ImageProcessing(
        grids=grids,
        pads_to_square=bool(config.get("do_pad", False)) and not grids,
        size=size if config.get("do_resize", True) else None,
        crop=crop if config.get("do_center_crop", True) else None,
        pan_and_scan=read_pan_and_scan(config) if pans else None,
        **_scaling(config),
    )


def read_pan_and_scan(config: Mapping[str, Any]) -> PanAndScan:
    """Read the settings, all of which are given. Raises UnsupportedModelError."""
    is_on, size, count, ratio = (config[key] for key in _PAN_AND_SCAN)
    if type(is_on) is not bool:
        raise _refusal("do_pan_and_scan", is_on, "true or false")
    if type(count) is not int or not 2 <= count <= _MAX_CROPS:
        raise _refusal("pan_and_scan_max_num_crops", count, f"whole numbers from 2 to {_MAX_CROPS}")
    ratio = _number(ratio, "pan_and_scan_min_ratio_to_activate")
    return PanAndScan(is_on, _edge(size, "pan_and_scan_min_crop_size"), count, ratio)


def _with_own_sizes(config: Mapping[str, Any]) -> ImageProcessing:
    """Read a processor of Qwen2-VL's kind, whose sizes are numbers of pixels."""
    known = _KNOWN | {*_OWN_SIZES, "min_pixels", "max_pixels"}
    config = _with_defaults(config, _OWN_SIZES, known)
    if not config["do_resize"] or config["do_center_crop"] or config.get("do_pad"):
        raise _refusal("do_resize", config["do_resize"], "true, without do_center_crop and do_pad")
    size = config["size"]
    if not isinstance(size, Mapping):
        raise _refusal("size", size, "shortest_edge and longest_edge, as numbers of pixels")
    least: Any = config.get("min_pixels", size.get("shortest_edge") or size.get("min_pixels"))
    most: Any = config.get("max_pixels", size.get("longest_edge") or size.get("max_pixels"))
    for key, value in (("min_pixels", least), ("max_pixels", most)):
        if type(value) is not int or not 1 <= value <= _MAX_PIXELS:
            raise _refusal(key, value, f"whole numbers from 1 to {_MAX_PIXELS}")
    if least > most:
        raise _refusal("min_pixels", least, f"at most max_pixels={most}")
    edge, merge, frames = (
        _edge(config[key], key) for key in ("patch_size", "merge_size", "temporal_patch_size")
    )
    return ImageProcessing(
        pads_to_square=False,
        size=None,
        crop=None,
        pixels=(least, most),
        patch=(edge, merge, frames),
        **_scaling(config),
    )


def _with_defaults(
    config: Mapping[str, Any], defaults: Mapping[str, Any], known: Set[str]
) -> dict[str, Any]:
    """Return the settings with what they leave out. Refuses those that mean nothing."""
    config = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    unknown = sorted(key for key in set(config) - known if config[key] not in (None, False))
    if unknown:
        raise _refusal(unknown[0], config[unknown[0]], "no such key")
    if config.get("do_convert_rgb") is False:
        raise _refusal("do_convert_rgb", False, "true")
    return config


def _scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what all processors have in common."""
    scales, normalizes = config.get("do_rescale", True), config.get("do_normalize", True)
    resample = config.get("resample", _BICUBIC)
    if resample not in _FILTERS:
        raise _refusal("resample", resample, "a filter of Pillow, 0 to 5")
    factor = _number(config.get("rescale_factor", 1 / 255), "rescale_factor")
    return {
        "resample": int(resample),
        "scale": factor if scales else 1.0,
        "mean": _channels(config, "image_mean", _CLIP_MEAN) if normalizes else (0.0,) * 3,
        "std": _channels(config, "image_std", _CLIP_STD) if normalizes else (1.0,) * 3,
    }


def _size(config: Mapping[str, Any], key: str, default: Any) -> tuple[int, int] | int:
    value = config.get(key) or default
    if isinstance(value, Mapping):
        given = {name: each for name, each in value.items() if each is not None}
        if set(given) == {"shortest_edge"}:
            return _edge(given["shortest_edge"], key)
        if set(given) == {"height", "width"}:
            return _edge(given["height"], key), _edge(given["width"], key)
        raise _refusal(key, value, "height and width, or shortest_edge")
    return _edge(value, key)


def _grid(value: object) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _refusal("image_grid_pinpoints", value, "pairs of height and width")
    height, width = (_edge(each, "image_grid_pinpoints") for each in value)
    return height, width


def _edge(value: object, key: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_EDGE:
        raise _refusal(key, value, f"whole numbers from 1 to {_MAX_EDGE}")
    return value


def _channels(
    config: Mapping[str, Any], key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = config.get(key) or default
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise _refusal(key, value, "three numbers")
    red, green, blue = (_number(each, key) for each in value)
    return red, green, blue


def _number(value: object, key: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(str(value))):
        raise _refusal(key, value, "finite numbers")
    return float(str(value))


def _refusal(key: str, value: object, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"preprocessor_config.json has {key}={repr(value)[:80]}; supported: {supported}"
    )
