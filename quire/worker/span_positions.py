"""The positions of a sequence whose images have rows and columns: three for each token, in time,
row and column.

A function of where the images of a prompt are and of nothing else, so no step, cache or preemption
has to keep it. Tokens of text have one position three times; an image counts as much as its longer
side, and its places have the same time, and a row and a column of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.images import Image, PlacedImage
from quire.kernels.placed import Rotations
from quire.nn.rope import mixed_rotations

GridOf = Callable[[Image], tuple[int, int]]
"""Rows and columns of an image's places."""


class SpanPositions:
    """What turns the tokens of steps, of one model."""

    def __init__(self, grid_of: GridOf, axes: tuple[int, ...], table: Tensor) -> None:
        """`axes` is `RopeSpec.axes`, `table` what `rope_table` gives."""
        self._grid_of, self._axes, self._table = grid_of, axes, table

    def rotations(self, spans: Sequence[tuple[Sequence[PlacedImage], int, int]]) -> Rotations:
        """Return what turns the tokens of a batch: of each sequence its images, and from and to
        which of its places it has tokens there."""
        parts = [positions_of(images, first, end, self._grid_of) for images, first, end in spans]
        found = np.concatenate(parts, axis=1)
        if (found == found[0]).all():
            return Rotations(torch.from_numpy(found[0].copy()), self._table)
        table = mixed_rotations(self._table, torch.from_numpy(found), self._axes)
        return Rotations(torch.arange(found.shape[1]), table)


def positions_of(
    images: Sequence[PlacedImage], first: int, end: int, grid_of: GridOf
) -> NDArray[np.int64]:
    """Return the positions of the tokens at the places [first, end), int64 [3, n]."""
    places = np.arange(first, end)
    found = np.tile(places, (3, 1))
    for start, image in images:
        if start >= end:
            break
        rows, columns = grid_of(image)
        behind = start + image.num_tokens
        found[:, places >= behind] -= image.num_tokens - max(rows, columns)
        within = (places >= start) & (places < behind)
        if within.any():
            number = places[within] - start
            found[:, within] -= number
            found[1, within] += number // columns
            found[2, within] += number % columns
    return found
