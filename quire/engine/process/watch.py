"""When an engine counts as lost, how soon another is started, and when to give up.
Arithmetic on times alone; that in which the supervisor itself was stopped is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.common.watch_clock import WatchClock
from quire.engine.process.messages import Heartbeat
from quire.errors import ConfigError

LOADING_SILENCE_S = 60.0
"""A process that starts says nothing while libraries are imported:
torch alone has taken 6 s on a busy machine."""
_MOST_COUNTED_S = 0.5
"""Of the time between two looks, of which the supervisor makes ten a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """How patient the supervisor is; times in seconds."""

    silence_timeout_s: float = 10.0
    """An engine that gives no sign of life for so long (a frozen process) is replaced.
    It gives four a second, idle or not."""
    step_timeout_s: float = 300.0
    """An engine whose one step takes so long is replaced, though it lives:
    a large prompt on a slow machine must fit."""
    load_timeout_s: float = 3600.0
    """A model that is not loaded by then never will be."""
    max_restarts: int = 5
    """Engines in a row that may die before any request has gained a token from them;
    then the server gives up."""
    first_pause_s: float = 0.25
    """Before the second start in a row; doubled for each further one.
    The first restart comes at once."""
    max_pause_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("silence_timeout_s", "step_timeout_s", "load_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above 0")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts!r} must be at least 0")


class Watch:
    """One engine's signs of life, and the record of those before it."""

    def __init__(self, config: WatchConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = WatchClock(_MOST_COUNTED_S, clock)
        self.heartbeat = Heartbeat()
        self.num_restarts = 0
        self.num_deaths_in_a_row = 0
        """Engines that died before any request had a token of them."""
        self.is_loaded = False
        self._last_sign_s: float | None = None
        self._last_step_s: float | None = None
        """When the last step was seen to have ended, or the last idle time."""
        self._started_s = 0.0

    def start(self) -> None:
        """Note that an engine has been started."""
        self._started_s = self._last_sign_s = self._clock()
        self.is_loaded = False
        self._last_step_s = None
        self.heartbeat = Heartbeat()

    def hear(self, heartbeat: Heartbeat | None = None) -> None:
        """Note a sign of life, and what it says, if it is a heartbeat."""
        now = self._last_sign_s = self._clock()
        if heartbeat is None:
            return
        if heartbeat.num_steps != self.heartbeat.num_steps or heartbeat.step_age_s is None:
            self._last_step_s = now - (heartbeat.step_age_s or 0.0)
        self.heartbeat = heartbeat

    @property
    def sign_age_s(self) -> float | None:
        """How long ago the last sign of life came."""
        return None if self._last_sign_s is None else self._clock() - self._last_sign_s

    @property
    def step_age_s(self) -> float | None:
        """How long ago the last step was seen to have ended, or the last idle time."""
        return None if self._last_step_s is None else self._clock() - self._last_step_s

    def note_progress(self) -> None:
        """Note that a request has a new token."""
        self.num_deaths_in_a_row = 0

    def complaint(self) -> str | None:
        """Return why the engine must be replaced, if it must."""
        config, now = self.config, self._clock()
        silent_s = 0.0 if self._last_sign_s is None else now - self._last_sign_s
        patience_s = (
            config.silence_timeout_s
            if self.is_loaded
            else max(config.silence_timeout_s, LOADING_SILENCE_S)
        )
        if silent_s > patience_s:
            return f"no sign of life for {silent_s:.1f} s"
        age_s = self.heartbeat.step_age_s
        if age_s is not None and age_s + silent_s > config.step_timeout_s:
            return f"one step has been running for {age_s:.0f} s"
        if not self.is_loaded and now - self._started_s > config.load_timeout_s:
            return f"the model is not loaded after {config.load_timeout_s:.0f} s"
        return None

    def pause_s(self) -> float | None:
        """An engine has died: how long to wait before the next is started; None to give up."""
        self.num_deaths_in_a_row += 1
        if self.num_deaths_in_a_row > self.config.max_restarts:
            return None
        self.num_restarts += 1
        if self.num_deaths_in_a_row == 1:
            return 0.0
        return min(
            self.config.max_pause_s,
            self.config.first_pause_s * 2.0 ** (self.num_deaths_in_a_row - 2),
        )
