"""For how long a request wants its prompt kept in the prefix cache, in the words of OpenAI's and
Anthropic's APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from quire.server.http.errors import bad_request

Retention = Literal["in_memory", "in-memory", "5m", "30m", "1h", "12h", "24h"]
"""OpenAI's two values, and times as Anthropic writes them. "in_memory" is as if nothing was said:
evicted by use."""
_SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}
_TTLS = ("5m", "1h")


def retention_s(retention: Retention | None) -> float:
    """Return seconds; 0 where nothing special is wanted."""
    return 0.0 if retention is None else _SECONDS.get(retention, 0.0)


def cache_control_s(*parts: Any) -> float:
    """Return the longest time that a `cache_control` in a body or its parts (the system prompt,
    turns, tools) gives, in seconds; 0 where there is none. Raises ApiError for what is none."""
    return max(map(_control_s, _controls(parts)), default=0.0)


def _controls(value: Any) -> Iterator[Any]:
    """Yield every `cache_control` of blocks: of turns, and of tools' results within them."""
    pending = [(value, 0)]
    while pending:
        each, depth = pending.pop()
        if isinstance(each, list | tuple) and depth < 6:
            pending.extend((item, depth + 1) for item in each)
        elif isinstance(each, dict):
            if each.get("cache_control") is not None:
                yield each["cache_control"]
            pending.append((each.get("content"), depth + 1))


def _control_s(control: Any) -> float:
    ttl = control.get("ttl") if isinstance(control, dict) else None
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise bad_request('cache_control: its type must be "ephemeral"', param="cache_control")
    if ttl is not None and ttl not in _TTLS:
        raise bad_request(
            f'cache_control.ttl must be "5m" or "1h", not {ttl!r:.80}', param="cache_control"
        )
    return _SECONDS[ttl or "5m"]
