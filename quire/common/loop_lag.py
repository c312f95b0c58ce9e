"""How late an event loop runs what is due: the time that others wait because something does not
give the loop back.

A timer is set again and again; what it fires late is the lag. Owns one timer; observes, never acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.05
"""Between two looks. A hold-up of the length d is seen as a mean lag of d/2 by the share d /
INTERVAL_S of all looks at least, and fully by one of them if it is longer than the interval; twenty
timers a second cost less than 0.1 % of a core.
"""


class LoopLagProbe:
    """Tells `observe` the lag in seconds, from `start` to `stop`.
    For the thread of the running loop."""

    def __init__(self, observe: Callable[[float], None], interval_s: float = INTERVAL_S) -> None:
        self._observe = observe
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            self._interval_s, self._fire, loop, loop.time() + self._interval_s
        )

    def stop(self) -> None:
        """End. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now = loop.time()
        self._observe(max(0.0, now - due_s))
        self._timer = loop.call_later(self._interval_s, self._fire, loop, now + self._interval_s)
