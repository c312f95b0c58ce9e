"""What is said when this process can take no more connections, because it may open no more files or
the system has none left.

asyncio stops listening for a second then, and goes on; without this, each second has its traceback.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SILENCE_S = 60.0


class ExhaustionLog:
    """An event loop's handler of unhandled exceptions. Says the same thing once a minute;
    the rest is as always."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if (
            not isinstance(error, OSError)
            or error.errno not in _EXHAUSTED
            or "accept" not in context.get("message", "")
        ):
            loop.default_exception_handler(context)
            return
        now_s = self._clock()
        if self._said_s is None or now_s - self._said_s >= _SILENCE_S:
            self._said_s = now_s
            logger.error(
                "no connection can be accepted now (%s): those that are open are served, "
                "others wait; raise ulimit -n, or "
                "lower --max-connections",
                errno.errorcode[error.errno],
            )
