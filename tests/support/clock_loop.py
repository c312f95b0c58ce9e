"""An event loop whose time a test moves on: what happens after a minute is seen at once,
and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class ClockLoop(asyncio.SelectorEventLoop):
    """Its clock stands still but for `pass_time`."""

    _now_s = 0.0

    def time(self) -> float:
        """Seconds since it was made."""
        return self._now_s

    async def pass_time(self, seconds: float) -> None:
        """So much later, when everything that was due by then has happened."""
        self._now_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


def run_in_clock_loop(main: Callable[[ClockLoop], Coroutine[Any, Any, None]]) -> None:
    """Run `main` of a new loop."""
    loop = ClockLoop()
    try:
        loop.run_until_complete(main(loop))
    finally:
        loop.close()
