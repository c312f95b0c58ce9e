"""Admission: whether a refusal still holds."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.request import Sequence


class Refusal(NamedTuple):
    """When the head of the queue was refused. It stays refused until something happens that could help it."""

    sequence: Sequence | None
    num_available: int
    num_free_rows: int
    num_prefill_publications: int

    def still_holds(self, now: Refusal) -> bool:
        """Whether neither blocks nor rows have come free since, nor a prompt's prefix been published to share."""
        return (
            self.sequence is now.sequence
            and self.num_available >= now.num_available
            and self.num_free_rows >= now.num_free_rows
            and self.num_prefill_publications == now.num_prefill_publications
        )
