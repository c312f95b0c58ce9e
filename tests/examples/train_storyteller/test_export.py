"""Weights that are written part of the way back to where their run began."""

from __future__ import annotations

import pytest
import torch

from examples.train_storyteller.export import blend
from examples.train_storyteller.growth import first_shape
from examples.train_storyteller.model import ModelShape, Storyteller


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_blend_has_its_share_of_the_start(share: float) -> None:
    model, start = Storyteller(first_shape()), Storyteller(first_shape())
    wanted = [
        (1 - share) * weight.detach() + share * first.detach()
        for weight, first in zip(model.parameters(), start.parameters(), strict=True)
    ]
    blend(model, start, share)
    for weight, expected in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(weight.detach(), expected)


def test_a_blend_with_another_shape_or_share_is_refused() -> None:
    model = Storyteller(first_shape())
    with pytest.raises(ValueError, match="give its own start"):
        blend(model, Storyteller(ModelShape()), 0.5)
    with pytest.raises(ValueError, match=r"is 1\.5; give one from 0 to 1"):
        blend(model, Storyteller(first_shape()), 1.5)
