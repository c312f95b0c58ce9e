"""Where supervisors' threads leave what the thread that steps is to do."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from typing import Any

from quire.engine.front.streams import Caller


class Inbox(Caller):
    """Calls that wait for their thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = (
            queue.SimpleQueue()
        )

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> None:
        """See `Caller`."""
        self._calls.put((callback, args))

    def run(self, timeout_s: float) -> None:
        """Do what there is; wait so long for something."""
        with contextlib.suppress(queue.Empty):
            callback, args = self._calls.get(timeout=timeout_s)
            while True:
                callback(*args)
                callback, args = self._calls.get_nowait()
