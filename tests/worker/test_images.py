"""Both halves of encoded images together, where one has lost track of the other: steps whose outcome
is lost, a control plane that starts over, images that take too long."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from quire.config.limits import SchedulerLimits
from quire.core.images import Image, PlacedImage, contents_of
from quire.core.plan import RowSampling, StepPlan, StepResult
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.images import MAX_ENCODE_S, EncodedImages
from quire.core.scheduler.scheduler import Scheduler
from quire.executor.null import NullExecutor
from quire.worker.images import ImageTable

NUM_ROWS, SIZE = 4, 4


class Tower:
    """Stands for a model: a stage, and a row of the image's first grey level for each place."""

    spec = SimpleNamespace(sees_whole=False)

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.slow: set[str] = set()

    def encode(self, pixels: Any, tiling: Any) -> Iterator[Tensor | None]:
        name = chr(pixels[0, 0, 0])
        self.begun.append(name)
        yield None
        while name in self.slow:
            yield None
        yield torch.full((SIZE, 1), float(ord(name)))


class Engine:
    """A scheduler and the table, around an executor without a model that reads the images."""

    def __init__(self, max_images: int = 2, *, prompt_tokens_of_step: int = 64) -> None:
        self.tower = Tower()
        self.table = ImageTable(cast("Any", self.tower), max_images * SIZE)
        self.limits = SchedulerLimits(
            num_blocks=64, max_num_seqs=NUM_ROWS, max_num_batched_tokens=prompt_tokens_of_step
        )
        self._max_tokens = max_images * SIZE
        self._executor = NullExecutor(NUM_ROWS, 64, self.limits.block_size, companions=[self.table])
        self.now = 0.0
        self.errors: dict[str, str | None] = {}
        self.start_over()

    def start_over(self) -> None:
        """Begin with an empty control plane; the table is not told."""
        self.scheduler = Scheduler(self.limits, prerequisites=[EncodedImages(self._max_tokens)])

    def add(self, name: str, images: str = "", max_tokens: int = 3) -> None:
        placed = tuple(
            PlacedImage(1 + n * SIZE, Image(each.encode() * 32, each.encode() * 3, 1, 1, SIZE))
            for n, each in enumerate(images)
        )
        prompt = tuple(range(3, 5 + SIZE * len(images)))
        spec = RequestSpec(
            request_id=name,
            prompt_token_ids=prompt,
            contents=contents_of(placed),
            sampling=RowSampling(images=placed),
            max_tokens=max_tokens,
        )
        self.scheduler.add(spec)

    def launch(self) -> tuple[StepPlan, StepResult]:
        """Plan and compute a step, whose rows' images must be there."""
        plan = self.scheduler.schedule(self.now)
        self.now += 0.01
        result = self._executor.execute(plan)
        starts = torch.tensor([0, *(work.num_tokens for work in plan.work)]).cumsum(0)
        ends = torch.tensor([work.start + work.num_tokens for work in plan.work])
        self.table.of_step([work.row for work in plan.work], starts, ends)
        assert self.table.num_bytes <= self._max_tokens * 4
        return plan, result

    def step(self) -> None:
        for sequence, token_id, _ in self.scheduler.update(*self.launch(), self.now):
            if token_id is None:
                self.errors[sequence.request.request_id] = sequence.request.error

    def run(self, most: int = 300) -> dict[str, str | None]:
        """Compute what there is; how each request ended."""
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        errors, self.errors = self.errors, {}
        return errors


def test_a_long_stage_by_stage_image_delays_its_own_request_alone() -> None:
    """Those that come while it is encoded, and nothing else is computed, are served beside it."""
    engine = Engine()
    engine.tower.slow = {"A"}
    engine.add("seen", "A")
    engine.step()
    engine.add("text")
    for _ in range(8):
        engine.step()
    assert engine.errors == {"text": None}


def test_a_control_plane_that_starts_over_finds_what_it_orders() -> None:
    """What rows of the one before have used must not cost the new one an image it counts on."""
    engine = Engine(max_images=2)
    engine.add("a", "A")
    assert engine.run() == {"a": None}
    engine.add("b", "B", max_tokens=60)
    for _ in range(4):
        engine.step()
    engine.start_over()
    engine.add("both", "AC")
    assert engine.run() == {"both": None}
    assert engine.tower.begun == ["A", "B", "C"], "A was there"


@pytest.mark.parametrize("num_lost", [1, 2, 5])
def test_lost_steps_cost_no_image_its_place(num_lost: int) -> None:
    engine = Engine(max_images=2)
    for number in range(9):
        engine.add(f"{number}", ("AB", "C", "BC")[number % 3])
    for _ in range(num_lost):
        engine.step()
        engine.launch()
        engine.scheduler.lose_flights()
    assert set(engine.run().values()) == {None}


def test_an_image_that_was_given_up_takes_no_room() -> None:
    engine = Engine(max_images=1)
    engine.tower.slow = {"A"}
    engine.add("a", "A")
    engine.step()
    engine.now += MAX_ENCODE_S + 1.0
    engine.step()
    assert "not encoded within" in str(engine.errors.pop("a"))
    engine.add("b", "B")
    engine.step()
    engine.tower.slow = set()
    assert engine.run() == {"b": None}
    engine.add("a", "A")
    assert engine.run() == {"a": None}


def test_a_late_verdict_is_not_taken_for_the_next_one() -> None:
    """Two steps in flight: the verdict on an image that was given up comes when the order to
    forget it, and to encode it again, is on its way."""
    images = EncodedImages(SIZE)
    engine = Engine(max_images=1)
    engine.add("a", "A")
    [sequence] = engine.scheduler.requests["a"].sequences
    images.park(sequence)
    [_, first] = images.take_orders(0.0)
    [(failed, error)] = images.take_news((), MAX_ENCODE_S + 1.0)
    assert failed == [sequence] and error is not None
    images.park(sequence)
    [_, again] = images.take_orders(MAX_ENCODE_S + 2.0)
    digest = again[0]
    assert images.take_news(((digest, None, first[2]),), MAX_ENCODE_S + 3.0) == []
    assert images.refusal(sequence) is not None
    assert images.take_news(((digest, None, again[2]),), MAX_ENCODE_S + 4.0)[0][0] == [sequence]


def test_images_behind_others_are_not_late() -> None:
    """Each has its time from when it is its turn, however many were ordered at once."""
    engine = Engine(max_images=8)
    for name in "ABCDEF":
        engine.add(name, name)
    for _ in range(60):
        engine.step()
        engine.now += MAX_ENCODE_S / 4
    assert engine.run() == dict.fromkeys("ABCDEF")
