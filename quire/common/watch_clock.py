"""A clock for who watches others for signs of life: a time in which the watcher itself was stopped
(Ctrl-Z, a frozen container) is not held against the watched.

It goes on by what has passed since it was last read, but by no more than a bound, and is to be read
more often than that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_LOOKS = 8
"""In the time that a wait is given; at most twice the time between two of them counts."""


class WatchClock:
    """Seconds in which it was looked at. For any number of threads."""

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`most_s` is the most that it goes on by from one reading to the next."""
        self._most_s, self._clock = most_s, clock
        self._lock = threading.Lock()
        self._now_s = self._read_s = clock()

    def __call__(self) -> float:
        """Read it."""
        with self._lock:
            read_s = self._clock()
            self._now_s += min(read_s - self._read_s, self._most_s)
            self._read_s = read_s
            return self._now_s


def looking_clock(timeout_s: float, clock: Callable[[], float]) -> tuple[WatchClock, float]:
    """Return a clock for a wait that is to last so long, and how often to read it."""
    interval_s = timeout_s / _LOOKS
    return WatchClock(2 * interval_s, clock), interval_s


@asynccontextmanager
async def counted_timeout(timeout_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, by a `WatchClock`: what came while the loop did not run is found before
    the time is over."""
    loop = asyncio.get_running_loop()
    clock, interval_s = looking_clock(timeout_s, loop.time)
    ends_s = clock() + timeout_s
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal timer
            left_s = ends_s - clock()
            if left_s <= 0.0:
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(min(left_s, interval_s), look)

        look()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
