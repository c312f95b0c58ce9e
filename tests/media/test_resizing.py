"""Processors give what those of transformers give that use Pillow, pixel by pixel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optional_packages import require
from vision_models import picture

from quire.errors import InvalidParameterError, UnsupportedModelError
from quire.media.resizing import crops_of, own_size, processed
from quire.models.image_processing import read_image_processing
from quire.nn.vision import PatchGrid, patches_of

Image = pytest.importorskip("PIL.Image")
require("transformers")

SQUARE = {"height": 28, "width": 28}
SETTINGS: list[dict[str, Any]] = [
    {"size": {"shortest_edge": 28}, "crop_size": SQUARE},
    {"size": {"shortest_edge": 20}, "crop_size": {"height": 28, "width": 31}},
    {"size": {"height": 30, "width": 25}, "do_center_crop": False},
    {"do_pad": True, "size": {"shortest_edge": 28}, "crop_size": SQUARE},
    {"do_resize": False, "crop_size": {"height": 28, "width": 33}, "resample": 2},
    {"size": {"shortest_edge": 33}, "crop_size": SQUARE, "resample": 2, "do_normalize": False},
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 30, "width": 31}},
    {"image_processor_type": "SiglipImageProcessorFast"},
    {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 30, "width": 31}},
    {"size": 28, "crop_size": 28, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
]
SIZES = [(40, 30), (28, 28), (17, 91), (91, 17), (5, 300), (27, 28), (29, 64), (336, 500)]


def _theirs(settings: dict[str, Any]) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    if settings.get("image_processor_type") == "Gemma3ImageProcessor":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(**settings)
    if "image_processor_type" in settings:
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        return SiglipImageProcessorPil(**settings)
    return (LlavaImageProcessorPil if settings.get("do_pad") else CLIPImageProcessorPil)(**settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_pixels_are_those_of_transformers(settings: dict[str, Any]) -> None:
    theirs, ours = _theirs(settings), read_image_processing(settings)
    for size in SIZES:
        pixels = picture(1, *size)
        want = theirs(Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
        found = processed(pixels, ours)
        assert found.shape[:2] == want.shape[1:], size
        scaled = patches_of(found, ours, 1).reshape(*found.shape[:2], 3).transpose(2, 0, 1)
        assert np.abs(scaled - want).max() <= 1e-6, size


def test_patches_are_a_convolution() -> None:
    import torch

    settings = read_image_processing(SETTINGS[0])
    pixels = processed(picture(2), settings)
    image = torch.from_numpy(patches_of(pixels, settings, 1)).reshape(1, 28, 28, 3)
    kernel = torch.randn(8, 3, 7, 7)
    want = torch.nn.functional.conv2d(image.permute(0, 3, 1, 2), kernel, stride=7)
    found = torch.from_numpy(patches_of(pixels, settings, 7)) @ kernel.flatten(1).T
    torch.testing.assert_close(found, want[0].flatten(1).T, atol=1e-4, rtol=1e-4)


def test_an_image_that_would_grow_is_refused() -> None:
    settings = read_image_processing({"size": {"shortest_edge": 8000}, "crop_size": 28})
    with pytest.raises(InvalidParameterError, match="closer to a square"):
        processed(picture(1, 2, 100), settings)
    squared = read_image_processing(SETTINGS[3])
    with pytest.raises(InvalidParameterError, match="padded to a square"):
        processed(np.zeros((100, 7000, 3), np.uint8), squared)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"do_flip": True}, "do_flip"),
        ({"image_processor_type": "Other"}, "image_processor_type"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"resample": 9}, "resample"),
        ({"size": {"longest_edge": 3}}, "size"),
        ({"crop_size": 0}, "crop_size"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": "x"}, "image_std"),
        ({"rescale_factor": float("nan")}, "rescale_factor"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(settings: Any, says: str) -> None:
    if settings == {"crop_size": 0}:
        settings = {"crop_size": -1}
    with pytest.raises(UnsupportedModelError, match=says):
        read_image_processing(settings)


@pytest.mark.parametrize(
    "limits", [(196, 196 * 6), (56 * 56, 28 * 28 * 1280), (196 * 4, 196 * 4), (1, 1 << 24)]
)
def test_images_that_keep_their_sizes_are_those_of_transformers(limits: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )
    from vision_models import OWN_SIZES, PATCH, qwen_config

    from quire.models.registry import declare

    given = {**OWN_SIZES, "min_pixels": limits[0], "max_pixels": limits[1]}
    kept = {key: value for key, value in given.items() if key != "image_processor_type"}
    theirs, ours = Qwen2VLImageProcessorPil(**kept), read_image_processing(given)
    vision = declare(qwen_config("Qwen2VL")).vision
    assert vision is not None
    for size in [*SIZES, (1, 180), (14, 14), (7, 7), (20, 21)]:
        pixels = picture(1, *size)
        try:
            want = theirs(Image.fromarray(pixels), return_tensors="np")
        except ValueError:  # they have no image of less than half a place
            continue
        found = processed(pixels, ours)
        assert [1, *(edge // PATCH for edge in found.shape[:2])] == want["image_grid_thw"][
            0
        ].tolist()
        order = PatchGrid.of(vision, *found.shape[:2]).patches
        patches = patches_of(found, ours, PATCH, 2)[order]
        assert np.abs(patches - want["pixel_values"]).max() <= 1e-6, size


@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 1 << 22), st.integers(1, 40))
def test_sizes_are_those_of_transformers(height: int, width: int, least: int, unit: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    most = 4 * least
    if max(height, width) > 200 * min(height, width):
        return
    want = smart_resize(height, width, unit, least, most)
    assert own_size((height, width), (least, most), unit) == want


@pytest.mark.parametrize("least", [1, 10, 30, 256])
@pytest.mark.parametrize("ratio", [1.2, 2.5])
def test_crops_are_those_of_transformers(least: int, ratio: float) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    settings = {
        "image_processor_type": "Gemma3ImageProcessor",
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": least,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": ratio,
        "size": {"height": 28, "width": 28},
    }
    theirs, ours = Gemma3ImageProcessorPil(**settings), read_image_processing(settings)
    for size in [*SIZES, (300, 701), (1100, 300), (600, 600)]:
        pixels = picture(1, *size)
        inputs = theirs(Image.fromarray(pixels), return_tensors="np")
        found = [processed(each, ours) for each in (pixels, *crops_of(pixels, ours))]
        assert len(found) == 1 + inputs["num_crops"][0], size
        for each, want in zip(found, inputs["pixel_values"], strict=True):
            scaled = patches_of(each, ours, 1).reshape(28, 28, 3).transpose(2, 0, 1)
            assert np.abs(scaled - want).max() <= 1e-6, size
