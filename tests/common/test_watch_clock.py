"""The clock of those who watch others: it goes on only while it is looked at."""

from __future__ import annotations

import asyncio

import pytest
from clock_loop import ClockLoop, run_in_clock_loop

from quire.common.watch_clock import WatchClock, counted_timeout


def test_between_two_looks_no_more_than_a_bound_passes() -> None:
    now_s = 100.0
    clock = WatchClock(0.5, lambda: now_s)
    began_s = clock()
    for _ in range(10):
        now_s += 0.4
        clock()
    assert clock() - began_s == pytest.approx(4.0)
    now_s += 3600.0
    assert clock() - began_s == pytest.approx(4.5)
    assert clock() - began_s == pytest.approx(4.5), "the leap counts once"


async def _wait_for(answer: asyncio.Future[str]) -> str:
    async with counted_timeout(8.0):
        return await answer


def test_a_timeout_counts_only_while_the_loop_runs() -> None:
    async def main(loop: ClockLoop) -> None:
        answer: asyncio.Future[str] = loop.create_future()
        waiting = asyncio.create_task(_wait_for(answer))
        await loop.pass_time(0.0)
        for _ in range(5):
            await loop.pass_time(1.0)
        await loop.pass_time(3600.0)
        assert not waiting.done()
        answer.set_result("came meanwhile")
        assert await waiting == "came meanwhile"

    run_in_clock_loop(main)


def test_a_timeout_ends_what_takes_longer() -> None:
    async def main(loop: ClockLoop) -> None:
        waiting = asyncio.create_task(_wait_for(loop.create_future()))
        await loop.pass_time(0.0)
        for _ in range(7):
            await loop.pass_time(1.0)
        assert not waiting.done()
        await loop.pass_time(1.0)
        with pytest.raises(TimeoutError):
            await waiting

    run_in_clock_loop(main)


def test_a_timeout_passes_on_what_else_ends_the_block() -> None:
    async def main(loop: ClockLoop) -> None:
        waiting = asyncio.create_task(_wait_for(loop.create_future()))
        await loop.pass_time(0.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(LookupError):
            async with counted_timeout(8.0):
                raise LookupError

    run_in_clock_loop(main)
