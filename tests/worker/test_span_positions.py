"""Positions of tokens among images that have rows and columns, beside those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.images import Image, PlacedImage
from quire.worker.span_positions import positions_of


def _grid(image: Image) -> tuple[int, int]:
    return image.height, image.width


def _images(gaps: list[int], grids: list[tuple[int, int]]) -> tuple[list[PlacedImage], int]:
    """Images behind so many tokens of text each, and the length of a prompt that ends with three
    more."""
    found, at = [], 0
    for gap, (rows, columns) in zip(gaps, grids, strict=True):
        at += gap
        found.append(PlacedImage(at, Image(b"", b"", rows, columns, rows * columns)))
        at = found[-1].end
    return found, at + 3


EDGE = st.integers(1, 5)
IMAGES = st.lists(st.tuples(st.integers(1, 4), st.tuples(EDGE, EDGE)), max_size=4)


@given(IMAGES, st.data())
def test_positions_are_a_function_of_the_place(
    drawn: list[tuple[int, tuple[int, int]]], data: st.DataObject
) -> None:
    """However a prompt is cut into steps, and beyond its end."""
    images, length = _images([gap for gap, _ in drawn], [grid for _, grid in drawn])
    whole = positions_of(images, 0, length + 4, _grid)
    cut = data.draw(st.integers(0, length + 4))
    parts = [positions_of(images, *span, _grid) for span in ((0, cut), (cut, length + 4))]
    assert (np.concatenate(parts, axis=1) == whole).all()
    assert (whole <= np.arange(length + 4)).all() and (whole >= 0).all()
    assert (np.diff(whole[:, length - 2 :]) == 1).all(), "text goes on one by one"


def test_positions_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from vision_models import QWEN_TEXT, QWEN_VISION

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {key: QWEN_TEXT[key] for key in QWEN_TEXT if key != "rope_scaling"}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=QWEN_VISION["Qwen2VL"]
    )
    with torch.device("meta"):
        theirs = transformers.Qwen2VLForConditionalGeneration(config).model
    grids = [(2, 3), (1, 5), (4, 1), (3, 3)]
    images, length = _images([2, 1, 4, 1], grids)
    kinds = torch.zeros(1, length, dtype=torch.int)
    for first, image in images:
        kinds[0, first : first + image.num_tokens] = 1
    sizes = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
    want, _ = theirs.get_rope_index(torch.zeros(1, length, dtype=torch.long), kinds, sizes)
    assert positions_of(images, 0, length, _grid).tolist() == want[:, 0].tolist()
