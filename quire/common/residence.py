"""The parts of an engine's memory that go back to the system while it sleeps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.errors import InvalidParameterError, NotAvailableError

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
PARTS = (WEIGHTS, KV_CACHE)
RPC_METHODS = ("update_weights", "sleep", "wake_up", "reset_prefix_cache")
"""What trainers call of every worker by name."""
UNDER_WAY = "an update of the weights is under way; wait for it"
_VERSION = re.compile(r"[A-Za-z0-9_.:/@+-]{1,128}", re.ASCII)


def check_level(level: object) -> int:
    """Return a level of sleep. Raises InvalidParameterError."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidParameterError(
            f"level={level!r} is no level of sleep: 1 keeps the weights in a file, 2 discards them",
            param="level",
        )
    return level


def check_parts(tags: Iterable[str] | None) -> tuple[str, ...]:
    """Return the parts that tags name; all of them by default. Raises InvalidParameterError."""
    if tags is None:
        return PARTS
    named = tuple(tags) if isinstance(tags, Iterable) and not isinstance(tags, str) else (tags,)
    unknown = [each for each in named if each not in PARTS]
    if unknown or not named:
        raise InvalidParameterError(
            f"tags={tags!r:.80} must be of {', '.join(PARTS)}; leave them out to wake everything",
            param="tags",
        )
    return tuple(each for each in PARTS if each in named)


def check_source(source: object) -> str | Mapping[Any, Any]:
    """Return where weights are to be taken from: a folder, or tensors as they were given. Raises
    InvalidParameterError."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path):
        raise InvalidParameterError(
            f"source is a {type(source).__name__}; give a folder with a checkpoint, or a mapping "
            "of tensors by their names",
            param="source",
        )
    return str(Path(source).expanduser())


def check_requests(requests: object) -> bool:
    """Return whether running requests end with the weights that they began with. Raises
    InvalidParameterError."""
    if requests not in ("resume", "finish"):
        raise InvalidParameterError(
            f"requests={requests!r} must be 'resume' (those that run go on with the new weights) "
            "or 'finish' (they end with the former ones)",
            param="requests",
        )
    return requests == "finish"


def check_version(version: object, number: int) -> str:
    """Return the name of a version, by default its number. Raises InvalidParameterError."""
    if version is None:
        return str(number)
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise InvalidParameterError(
            f"version={str(version)[:128]!r} must be 1 to 128 letters, digits and _.:/@+-",
            param="version",
        )
    return version


def check_rpc(method: object) -> None:
    """Raise NotAvailableError unless trainers may call this by name."""
    if method not in RPC_METHODS:
        raise NotAvailableError(
            f"collective_rpc({method!r}) is not available; choose one of "
            f"{', '.join(RPC_METHODS)}, or give a function"
        )
