"""Whether a replica may be sent requests: a circuit breaker, told by served requests and by probes.

Closed, it lets everything pass. Failures in a row open it for a while that doubles each time; then
it is half open and lets one request pass, whose outcome closes it or opens it again. Knows no clock
and no socket: times are passed in.
"""

from __future__ import annotations

from enum import Enum

MAX_FAILURES = 3
"""In a row, of requests that were sent and came to nothing."""
FIRST_WAIT_S = 1.0
MAX_WAIT_S = 30.0


class BreakerState(Enum):
    """What a breaker lets pass."""

    CLOSED = "up"
    OPEN = "down"
    HALF_OPEN = "trial"


class Breaker:
    """The judgement on one replica."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._wait_s = FIRST_WAIT_S
        self._opens_until_s: float | None = None
        self._trial_since_s: float | None = None
        self.has_served = False
        """Whether it has ever answered."""

    def state(self, now_s: float) -> BreakerState:
        """Return the state."""
        if self._opens_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._opens_until_s else BreakerState.HALF_OPEN

    def may_send(self, now_s: float) -> bool:
        """Return whether a request may go there: while half open, one at a time."""
        state = self.state(now_s)
        if state is BreakerState.HALF_OPEN:
            # A trial that never said how it ended must not keep the replica out for good.
            since_s = self._trial_since_s
            return since_s is None or now_s - since_s >= MAX_WAIT_S
        return state is BreakerState.CLOSED

    def send(self, now_s: float) -> None:
        """Note that a request goes there."""
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._trial_since_s = now_s

    def cancel(self) -> None:
        """Note that a request ended without telling anything: its client left."""
        self._trial_since_s = None

    def succeed(self) -> None:
        """Note an answer."""
        self._num_failures = 0
        self._wait_s = FIRST_WAIT_S
        self._opens_until_s = self._trial_since_s = None
        self.has_served = True

    def fail(self, now_s: float, *, is_certain: bool = False) -> bool:
        """Note a failure; `is_certain` where one is enough, as where nothing listens. Returns
        whether that opened the breaker, which until then was closed.
        """
        self._num_failures += 1
        self._trial_since_s = None
        was = self.state(now_s)
        if was is BreakerState.OPEN:
            return False
        if was is BreakerState.CLOSED and not is_certain and self._num_failures < MAX_FAILURES:
            return False
        self._opens_until_s = now_s + self._wait_s
        self._wait_s = min(MAX_WAIT_S, 2 * self._wait_s)
        return was is BreakerState.CLOSED

    def retry(self, now_s: float) -> None:
        """Let a trial pass at once: a probe has been answered."""
        if self._opens_until_s is not None:
            self._opens_until_s = min(self._opens_until_s, now_s)

    def wait_s(self, now_s: float) -> float:
        """Return the time until a request may pass; 0 for now."""
        return 0.0 if self._opens_until_s is None else max(0.0, self._opens_until_s - now_s)
