"""How an engine is, as servers and operators are told."""

from __future__ import annotations

from typing import Literal

from quire.engine.loop.counters import EngineCounters

EngineState = Literal[
    "loading", "ready", "sleeping", "stalled", "restarting", "draining", "failed", "closed"
]
"""`sleeping`: its memory went back to the system, and requests wait for it. `stalled`: the engine
shows no sign of progress and is about to be replaced. `failed`: given up for good."""


class EngineStatus(EngineCounters, frozen=True, kw_only=True):
    """A picture of the engine now. Times are ages in seconds."""

    state: EngineState
    reason: str = ""
    """Why it is not ready, in words for an operator; empty where it is."""
    num_requests: int = 0
    """Requests in flight, wherever they are."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests in flight."""
    last_step_age_s: float | None = None
    """Since the last step ended, while there is work; None while there is none."""
    last_sign_of_life_age_s: float | None = None
    num_restarts: int = 0
    engine_pid: int | None = None
    replicas: tuple[EngineStatus, ...] = ()
    """Of each engine, where there are several."""

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served now: what /readyz says."""
        return self.state == "ready"

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the server is about to end."""
        return self.state == "draining"
