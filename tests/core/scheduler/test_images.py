"""Encoded images as a prerequisite: who waits, what is forgotten for whom, and that no wait is for
ever."""

from __future__ import annotations

from quire.config.limits import SchedulerLimits
from quire.core.images import (
    FORGET_ALL_IMAGES,
    IMAGES,
    Image,
    ImageOrder,
    ImageVerdict,
    PlacedImage,
    contents_of,
)
from quire.core.plan import Record, RowSampling, StepPlan
from quire.core.request import FinishReason
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.images import MAX_ENCODE_S, EncodedImages
from quire.core.scheduler.scheduler import Scheduler
from quire.executor.null import NullExecutor

SIZE = 4


def image(name: str) -> Image:
    return Image(name.encode() * 32, b"", 1, 1, SIZE)


class Tower:
    """A companion that encodes when told to, and checks what it is asked to keep."""

    name = IMAGES

    def __init__(self, max_images: int) -> None:
        self.there: set[bytes] = set()
        self.orders: list[ImageOrder] = []
        self.is_slow = False
        self.broken: set[bytes] = set()
        self.num_encoded = 0
        self._max_images = max_images
        self._needed: dict[int, tuple[PlacedImage, ...]] = {}

    def begin(self, plan: StepPlan) -> None:
        for row in plan.removed_rows:
            self._needed.pop(row, None)
        for order in map(ImageOrder._make, plan.orders.get(IMAGES, ())):
            if order == FORGET_ALL_IMAGES:
                self.there.clear()
                self.orders.clear()
            elif order.image is None:
                self.there.discard(order.digest)
                self.orders = [each for each in self.orders if each.digest != order.digest]
            else:
                self.orders.append(order)
        for new in plan.new_rows:
            self._needed[new.row] = new.sampling.images
        for work in plan.work:
            for first, each in self._needed[work.row]:
                is_read = first < work.start + work.num_tokens and work.start < first + SIZE
                assert not is_read or each.digest in self.there, "it is read and was forgotten"

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        if self.is_slow:
            return ()
        asked, self.orders = self.orders, []
        self.there |= {each.digest for each in asked if each.digest not in self.broken}
        self.num_encoded += len(asked)
        assert len(self.there) <= self._max_images
        return tuple(
            ImageVerdict(
                each.digest, "is broken" if each.digest in self.broken else None, each.number
            )
            for each in asked
        )

    def close(self) -> None:
        pass


class Engine:
    """A scheduler with images and an executor without a model."""

    def __init__(self, max_images: int = 2, num_blocks: int = 64, tokens: int = 5) -> None:
        limits = SchedulerLimits(
            num_blocks=num_blocks, block_size=4, max_num_seqs=3, max_num_batched_tokens=tokens
        )
        self.tower = Tower(max_images)
        self.scheduler = Scheduler(limits, prerequisites=[EncodedImages(max_images * SIZE)])
        self._executor = NullExecutor(3, num_blocks, 4, companions=[self.tower])
        self.now = 0.0
        self.ended: list[str] = []
        self.errors: dict[str, str | None] = {}

    def add(self, name: str, images: str = "", max_tokens: int = 4, num_sequences: int = 1) -> None:
        placed = tuple(PlacedImage(2 + n * SIZE, image(each)) for n, each in enumerate(images))
        prompt = tuple(range(3, 6 + SIZE * len(images)))
        spec = RequestSpec(
            request_id=name,
            prompt_token_ids=prompt,
            contents=contents_of(placed),
            sampling=RowSampling(images=placed),
            max_tokens=max_tokens,
            num_sequences=num_sequences,
        )
        self.scheduler.add(spec)

    def step(self, seconds: float = 0.01) -> None:
        plan = self.scheduler.schedule(self.now)
        self.now += seconds
        for sequence, token_id, _ in self.scheduler.update(
            plan, self._executor.execute(plan), self.now
        ):
            if token_id is None:
                name = sequence.request.request_id
                self.ended.append(name)
                is_error = sequence.finish_reason is FinishReason.ERROR
                self.errors[name] = sequence.request.error if is_error else None

    def run(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests never end")


def test_images_delay_their_own_requests_alone() -> None:
    engine = Engine()
    engine.tower.is_slow = True
    engine.add("seen", "a")
    engine.add("text")
    for _ in range(10):
        engine.step()
    assert engine.ended == ["text"]
    engine.tower.is_slow = False
    engine.run()
    assert engine.ended == ["text", "seen"] and engine.tower.num_encoded == 1


def test_more_images_than_there_is_room_for_take_turns() -> None:
    engine = Engine(max_images=2)
    for number, images in enumerate(["ab", "bc", "a", "cd", "ab", "", "dd"]):
        engine.add(str(number), images, max_tokens=9)
    engine.run()
    assert sorted(engine.ended) == [str(n) for n in range(7)]
    assert set(engine.errors.values()) == {None}


def test_an_image_whose_places_are_computed_makes_room() -> None:
    """A long answer does not hold up the images of others."""
    engine = Engine(max_images=1, tokens=32)
    engine.add("long", "a", max_tokens=60)
    for _ in range(4):
        engine.step()
    engine.add("short", "b", max_tokens=2)
    engine.run()
    assert engine.ended == ["short", "long"]


def test_preempted_sequences_get_their_images_again() -> None:
    engine = Engine(max_images=1, tokens=4)
    engine.add("one", "a", max_tokens=8)
    engine.add("two", "b", max_tokens=8)
    for number in range(400):
        if not engine.scheduler.has_work:
            break
        engine.step()
        if number % 7 == 6:
            engine.scheduler.preempt_all()
    assert sorted(engine.ended) == ["one", "two"] and engine.tower.num_encoded > 2


def test_forks_need_no_images() -> None:
    engine = Engine(max_images=1)
    engine.add("many", "a", max_tokens=12, num_sequences=3)
    engine.add("other", "b")
    engine.run()
    assert engine.errors == {"many": None, "other": None}


def test_a_broken_image_ends_those_that_wait_for_it() -> None:
    engine = Engine()
    engine.tower.broken = {image("b").digest}
    engine.add("good", "a")
    engine.add("bad", "ab")
    engine.run()
    assert engine.errors == {"good": None, "bad": "is broken"}


def test_a_wait_for_the_tower_ends() -> None:
    engine = Engine()
    engine.tower.is_slow = True
    engine.add("seen", "a")
    engine.step()
    engine.step(MAX_ENCODE_S + 1)
    engine.step()
    assert "not encoded within" in str(engine.errors["seen"])


def test_one_that_leaves_is_forgotten() -> None:
    engine = Engine(max_images=1)
    engine.tower.is_slow = True
    engine.add("gone", "a")
    engine.add("stays", "b")
    engine.step()
    engine.scheduler.abort("gone")
    engine.tower.is_slow = False
    engine.run()
    assert engine.errors["stays"] is None


def test_lost_steps_are_made_up_for() -> None:
    """Plans with orders may never have been launched, and news may be lost."""
    engine = Engine(max_images=2)
    engine.add("a", "ab", max_tokens=9)
    engine.add("b", "cd", max_tokens=9)
    engine.scheduler.schedule(engine.now)  # its orders reach no executor
    for lost in range(4):
        engine.scheduler.preempt_all()
        engine.scheduler.lose_flights()
        for _ in range(lost + 1):
            engine.step()
    engine.run()
    assert engine.errors == {"a": None, "b": None}
