"""Companions that raise: those that wait for them end once, and the engine goes on with the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quire.config.limits import SchedulerLimits
from quire.core.images import (
    FORGET_ALL_IMAGES,
    IMAGES,
    Image,
    ImageOrder,
    ImageVerdict,
    PlacedImage,
)
from quire.core.plan import Record, RowSampling, StepPlan, StepResult
from quire.core.request import Request
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.images import EncodedImages
from quire.engine.loop.launchers import StepThread
from quire.engine.loop.step_loop import OverlappedLoop, PlainLoop, StepLoop
from quire.executor.null import NullExecutor

LIMITS = SchedulerLimits(num_blocks=64, max_num_seqs=4)


class Broken:
    """A companion that raises in the method `where` while it has an order, `times` times."""

    name = IMAGES

    def __init__(self) -> None:
        self.where, self.times = "", 1000
        self._asked: list[ImageOrder] = []

    def begin(self, plan: StepPlan) -> None:
        for order in map(ImageOrder._make, plan.orders.get(IMAGES, ())):
            if order == FORGET_ALL_IMAGES:
                self._asked.clear()
            else:
                self._asked.append(order)
        self._break("begin")

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        self._break("take_news")
        asked, self._asked = self._asked, []
        return tuple(ImageVerdict(order.digest, None, order.number) for order in asked)

    def close(self) -> None:
        pass

    def _break(self, where: str) -> None:
        if where == self.where and self._asked and self.times:
            self.times -= 1
            raise ValueError("broken")


@pytest.fixture
def broken() -> Broken:
    return Broken()


@pytest.fixture(params=["plain", "overlapped"])
def loop(request: pytest.FixtureRequest, broken: Broken) -> Iterator[StepLoop]:
    order = PlainLoop() if request.param == "plain" else OverlappedLoop(StepThread())
    executor = NullExecutor(4, 64, LIMITS.block_size, companions=[broken])
    made = StepLoop(
        LIMITS, executor, time.monotonic, order, prerequisites=[lambda: EncodedImages(8)]
    )
    yield made
    made.close()


def _add(loop: StepLoop, name: str, *, image: str = "", max_tokens: int = 12) -> Request:
    placed = (PlacedImage(1, Image(image.encode() * 32, b"", 1, 1, 4)),) if image else ()
    return loop.scheduler.add(
        RequestSpec(
            request_id=name,
            prompt_token_ids=tuple(range(3, 9)),
            sampling=RowSampling(images=placed),
            max_tokens=max_tokens,
        )
    )


def _run(loop: StepLoop, most: int = 200) -> set[str]:
    """Run to the end; the requests whose end was told."""
    ended = set[str]()
    for _ in range(most):
        if not loop.has_work:
            return ended
        ended |= {each.sequence.request.request_id for each in loop.advance() if not each.token_id}
    raise AssertionError("the same step is lost again and again")


@pytest.mark.parametrize("where", ["begin", "take_news"])
def test_those_that_wait_for_a_broken_companion_end(
    where: str, loop: StepLoop, broken: Broken
) -> None:
    broken.where = where
    seen = [_add(loop, name, image=name) for name in "ab"]
    assert _run(loop) >= {"a", "b"}
    assert all("ValueError" in str(each.error) for each in seen)


@pytest.mark.parametrize("where", ["begin", "take_news"])
def test_those_that_run_beside_them_are_not_harmed(
    where: str, loop: StepLoop, broken: Broken
) -> None:
    text = _add(loop, "alone")
    _run(loop)
    answer = text.sequences[0].output_token_ids
    broken.where = where
    text = _add(loop, "text")
    for _ in range(4):
        loop.advance()
    seen = _add(loop, "seen", image="a")
    _run(loop)
    assert text.error is None and list(text.sequences[0].output_token_ids) == list(answer)
    assert "ValueError" in str(seen.error)


@pytest.mark.parametrize("where", ["begin", "take_news"])
def test_a_companion_that_recovers_serves_the_next(
    where: str, loop: StepLoop, broken: Broken
) -> None:
    broken.where, broken.times = where, 1
    seen = _add(loop, "first", image="a")
    _run(loop)
    later = _add(loop, "later", image="a")
    _run(loop)
    assert seen.error is not None and later.error is None


def test_a_step_without_work_that_fails_by_itself_is_not_repeated(loop: StepLoop) -> None:
    class Executor(NullExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            raise ValueError("lost")

    loop.executor = Executor(4, 64, LIMITS.block_size)
    seen = _add(loop, "a", image="a")
    assert "a" in _run(loop) and "ValueError" in str(seen.error)
