"""JSON as it is written by hand, in an option: what it says twice is a mistake."""

from __future__ import annotations

import json
from typing import Any


class RepeatedKeyError(ValueError):
    """A key comes twice in one object, of which Python's reader would take the last."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for what is none: RepeatedKeyError where
    it would be one but for a key that comes twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeated)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKeyError(f"{key!r} comes twice in one object")
        found[key] = value
    return found
