"""Where the hidden states of some work come from, for a head that adapters may change."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.plan import RowWork
from quire.kernels.lora import StatePlaces
from quire.nn.decoder import DecoderModel


def last_places(model: DecoderModel, work: Sequence[RowWork]) -> StatePlaces | None:
    """Return where the states of the last position of each work come from; None where the model
    takes no adapters."""
    if model.adapters is None:
        return None
    return StatePlaces(
        [item.row for item in work], [item.start + item.num_tokens - 1 for item in work]
    )


def places_of(model: DecoderModel, row: int, positions: range) -> StatePlaces | None:
    """Return the same of neighbouring positions of one row."""
    if model.adapters is None:
        return None
    return StatePlaces([row] * len(positions), positions)
