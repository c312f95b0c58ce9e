"""For how long a request wants its prompt kept in the prefix cache, in the words of OpenAI's and
Anthropic's APIs."""

from __future__ import annotations

from typing import Any, Literal

from quire.core.request_spec import Keep
from quire.server.http.errors import bad_request

Retention = Literal["in_memory", "in-memory", "5m", "30m", "1h", "12h", "24h"]
"""OpenAI's two values, and times as Anthropic writes them. "in_memory" is as if nothing was said:
evicted by use."""
_SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}
_TTLS = ("5m", "1h")


def retention(wanted: Retention | None) -> tuple[Keep, ...]:
    """Return for how long the whole prompt is to be kept; empty where nothing special is wanted."""
    seconds = 0.0 if wanted is None else _SECONDS.get(wanted, 0.0)
    return (Keep(None, seconds),) if seconds else ()


def control_s(control: Any) -> float:
    """Return the seconds that a `cache_control` gives. Raises ApiError for what is none."""
    ttl = control.get("ttl") if isinstance(control, dict) else None
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise bad_request('cache_control: its type must be "ephemeral"', param="cache_control")
    if ttl is not None and ttl not in _TTLS:
        raise bad_request(
            f'cache_control.ttl must be "5m" or "1h", not {ttl!r:.80}', param="cache_control"
        )
    return _SECONDS[ttl or "5m"]
