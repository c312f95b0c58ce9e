"""Start one new request per round of the event loop, so that a burst does not hold it up.

Preparing a request (its body, its prompt's tokens) takes a millisecond or so of the loop's thread.
The loop would do that for all requests that are ready before it looks at anything else again; here
each round of the loop lets one of them begin, in order of arrival, so that streams under way,
timers and /livez get their turn in between. Owns the order, never a request.
"""

from __future__ import annotations

import asyncio
from collections import deque


class StartLimiter:
    """Limits request starts of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_open = True
        """Whether no request has started in this round."""

    async def enter(self) -> None:
        """Wait for a turn; return at once where no other request has started in this round."""
        loop = asyncio.get_running_loop()
        if self._is_open:
            self._is_open = False
            loop.call_soon(self._next, loop)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """A round has passed."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a request that gave up has left a cancelled one
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._is_open = True
