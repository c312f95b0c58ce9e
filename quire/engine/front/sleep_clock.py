"""How long an engine has slept: the part of a request's life in which nothing could be computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class SleepClock:
    """The sum of all sleeps, of several engines those of all of them together."""

    def __init__(self) -> None:
        self.before_s = 0.0
        """Of sleeps that are over."""
        self._since_s: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds, the sleep of this moment included."""
        since_s = self._since_s
        return self.before_s + (0.0 if since_s is None else time.monotonic() - since_s)

    @contextmanager
    def watching(self, states: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Count by the states that engines have after what is done meanwhile, however that ends."""
        try:
            yield
        finally:
            if not all(state == "sleeping" for state in states()):
                self.before_s, self._since_s = self.total_s, None
            elif self._since_s is None:
                self._since_s = time.monotonic()
