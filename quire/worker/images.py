"""The encoded images of one executor: computed between steps, and read where a prompt has them.

Owns the memory that their rows take. What is encoded and forgotten is the control plane's decision
(`quire.core.scheduler.images`). An image is encoded by the thread that computes the steps, whose
cores it would take from them anyway: a stage behind each step, so that none has to wait for more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.common.failures import log_failure
from quire.core.images import (
    FORGET_ALL_IMAGES,
    IMAGES,
    Image,
    ImageOrder,
    ImageVerdict,
    PlacedImage,
)
from quire.core.plan import Record, StepPlan
from quire.errors import RequestError
from quire.kernels.placed import PlacedRows, StepContent
from quire.nn.vision import VisionModel
from quire.worker.span_positions import SpanPositions

logger = logging.getLogger(__name__)

Encoding = tuple[ImageOrder, Iterator[Tensor | None]]
"""An order, and what is left to be computed for it."""


class _Span(NamedTuple):
    """A sequence's tokens of a step: those at its places [first, end)."""

    images: tuple[PlacedImage, ...]
    first: int
    end: int
    at: int
    """Where they begin in the batch."""


class ImageTable:
    """Implements `Companion` and `ContentSource`."""

    name = IMAGES

    def __init__(self, model: VisionModel, max_tokens: int) -> None:
        """Keep at most `max_tokens` rows, as the control plane does."""
        self._model, self._max_tokens = model, max_tokens
        self._sees_whole = model.spec.sees_whole
        self.positions: SpanPositions | None = None
        """Where places of images are counted by row and column."""
        self._rows: dict[bytes, Tensor] = {}
        self._spare: dict[bytes, Tensor] = {}
        """Encoded for a control plane that started over and may want them again: what there is
        room for beside the others."""
        self._of_row: dict[int, tuple[PlacedImage, ...]] = {}
        self._asked: deque[ImageOrder] = deque()
        self._encoding: Encoding | None = None
        self._verdicts: list[ImageVerdict] = []
        self.num_encoded = 0
        """Images, since the start."""

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the tower's weights."""
        return self._model.tensors

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take."""
        return sum(rows.nbytes for rows in (*self._rows.values(), *self._spare.values()))

    def begin(self, plan: StepPlan) -> None:
        for row in plan.removed_rows:
            self._of_row.pop(row, None)
        for order in map(ImageOrder._make, plan.orders.get(IMAGES, ())):
            if order == FORGET_ALL_IMAGES:
                self._forget_all()
            elif order.image is None:
                self._forget(order.digest)
            elif order.digest in self._spare:
                self._rows[order.digest] = self._spare.pop(order.digest)
                self._end(order)
            else:
                self._asked.append(order)
        for new in plan.new_rows:
            if new.sampling.images:
                self._of_row[new.row] = new.sampling.images

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        self._advance()
        found, self._verdicts = tuple(self._verdicts), []
        return found

    def close(self) -> None:
        self._encoding = None
        self._asked.clear()

    def concerns(self, rows: Sequence[int]) -> bool:
        return not self._of_row.keys().isdisjoint(rows)

    def of_step(
        self, rows: Sequence[int], query_start: Tensor, context_len: Tensor
    ) -> StepContent | None:
        """See `ContentSource`. Raises RequestError where an image is read that is not there."""
        if not self.concerns(rows):
            return None
        starts, ends = query_start.tolist(), context_len.tolist()
        spans = [
            _Span(self._of_row.get(row, ()), end - (after - start), end, start)
            for row, start, after, end in zip(rows, starts, starts[1:], ends, strict=False)
        ]
        rotations = None
        if self.positions is not None:
            rotations = self.positions.rotations([span[:3] for span in spans])
        key_ends = _key_ends(spans) if self._sees_whole else None
        return StepContent(self._placed(spans), rotations, key_ends)

    def _placed(self, spans: Sequence[_Span]) -> PlacedRows | None:
        """Return the rows of the images that some of the step's tokens hold the places of."""
        tokens, found = list[Tensor](), list[Tensor]()
        for images, first, last, at in spans:
            for start, image in images:
                begin, end = max(start, first), min(start + image.num_tokens, last)
                if begin >= end:
                    continue
                if image.digest not in self._rows:
                    raise RequestError("an image is read that was not encoded")
                tokens.append(torch.arange(begin - first + at, end - first + at))
                found.append(self._rows[image.digest][begin - start : end - start])
        return PlacedRows(torch.cat(tokens), torch.cat(found)) if tokens else None

    def _forget_all(self) -> None:
        self._spare |= self._rows
        self._rows = {}
        self._of_row.clear()
        self._verdicts.clear()
        self.close()

    def _forget(self, digest: bytes) -> None:
        self._rows.pop(digest, None)
        self._asked = deque(order for order in self._asked if order.digest != digest)
        if self._encoding is not None and self._encoding[0].digest == digest:
            self._encoding = None

    def _advance(self) -> None:
        """Compute a stage of the image that is being encoded, or of the next one."""
        if self._encoding is None:
            if not self._asked:
                return
            order = self._asked.popleft()
            assert order.image is not None
            self._encoding = order, self._stages(order.image)
        order, stages = self._encoding
        try:
            rows = next(stages)
            if rows is not None:
                self._keep(order, rows)
        except Exception as error:  # a bug ends those that wait for this image alone
            log_failure(logger, "an image could not be encoded", error)
            self._encoding = None
            self._end(order, f"an image failed: {type(error).__name__}")

    def _stages(self, image: Image) -> Iterator[Tensor | None]:
        """Encode an image; nothing of it runs, or fails, before the first stage does."""
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
        yield from self._model.encode(pixels, image.tiling)

    def _keep(self, order: ImageOrder, rows: Tensor) -> None:
        self._encoding = None
        if not bool(torch.isfinite(rows).all()):
            self._end(order, "the tower computed numbers that are not finite")
            return
        num_tokens = sum(map(len, (*self._rows.values(), *self._spare.values(), rows)))
        while self._spare and num_tokens > self._max_tokens:
            num_tokens -= len(self._spare.pop(next(iter(self._spare))))
        self._rows[order.digest] = rows
        self.num_encoded += 1
        self._end(order)

    def _end(self, order: ImageOrder, error: str | None = None) -> None:
        self._verdicts.append(ImageVerdict(order.digest, error, order.number))


def _key_ends(spans: Sequence[_Span]) -> Tensor | None:
    """Return how far each of the step's tokens sees: those in places of an image to its end, int32
    [T]; None where none of them is in one."""
    found, sees_more = list[Tensor](), False
    for images, first, last, _ in spans:
        ends = torch.arange(first + 1, last + 1, dtype=torch.int32)
        for image in images:
            if image.first < last and first < image.end:
                sees_more = True
                ends[max(image.first - first, 0) : image.end - first] = image.end
        found.append(ends)
    return torch.cat(found) if sees_more else None
