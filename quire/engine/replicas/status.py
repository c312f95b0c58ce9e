"""How several engines are doing together, as one status."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from quire.engine.front.status import EngineState, EngineStatus

_STATES: tuple[EngineState, ...] = (
    "ready", "sleeping", "stalled", "restarting", "loading", "draining", "failed", "closed",
)  # fmt: skip
"""The best one counts: one engine that is ready serves everything."""


def joined(
    replicas: Sequence[EngineStatus], num_requests: int, num_prompt_tokens: int
) -> EngineStatus:
    """Return one status: counts are sums, ages those of the engine that is furthest behind."""
    best = min(replicas, key=lambda each: _STATES.index(each.state))
    counters = {
        name: _sum([each.counters()[name] for each in replicas]) for name in best.counters()
    }
    counters["kv_usage"] /= len(replicas)
    counters["target_step_s"] = max(each.target_step_s for each in replicas)
    counters["is_kv_storing_off"] = any(each.is_kv_storing_off for each in replicas)
    ages = [each.last_step_age_s for each in replicas if each.last_step_age_s is not None]
    signs = [
        each.last_sign_of_life_age_s
        for each in replicas
        if each.last_sign_of_life_age_s is not None
    ]
    return EngineStatus(
        state=best.state,
        reason=best.reason,
        num_requests=num_requests,
        num_prompt_tokens=num_prompt_tokens,
        **counters,
        last_step_age_s=max(ages, default=None),
        last_sign_of_life_age_s=max(signs, default=None),
        num_restarts=sum(each.num_restarts for each in replicas),
        replicas=tuple(replicas),
    )


def _sum(values: Sequence[Any]) -> Any:
    """Sums of numbers, and of tuples element by element."""
    if isinstance(values[0], tuple):
        return tuple(map(sum, zip_longest(*values, fillvalue=0)))
    return sum(values)
