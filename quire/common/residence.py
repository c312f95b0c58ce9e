"""The parts of an engine's memory that go back to the system while it sleeps."""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import InvalidParameterError

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
PARTS = (WEIGHTS, KV_CACHE)


def check_level(level: object) -> int:
    """Return a level of sleep. Raises InvalidParameterError."""
    if level not in (1, 2) or isinstance(level, bool):
        raise InvalidParameterError(
            f"level={level!r} is no level of sleep: 1 keeps the weights in a file, 2 discards them",
            param="level",
        )
    return int(str(level))


def check_parts(tags: Iterable[str] | None) -> tuple[str, ...]:
    """Return the parts that tags name; all of them by default. Raises InvalidParameterError."""
    if tags is None:
        return PARTS
    named = (tags,) if isinstance(tags, str) else tuple(tags)
    unknown = [each for each in named if each not in PARTS]
    if unknown or not named:
        raise InvalidParameterError(
            f"tags={named!r} must be of {', '.join(PARTS)}; leave them out to wake everything",
            param="tags",
        )
    return tuple(each for each in PARTS if each in named)
