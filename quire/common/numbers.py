"""Named integer arithmetic and human-readable sizes."""

from __future__ import annotations

import re

from quire.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = _UNITS[_letter] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_MAX_DIGITS, _MAX_BYTES = 20, 2**63
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the smallest integer not below `numerator / denominator`."""
    return -(-numerator // denominator)


def align_down(value: int, unit: int) -> int:
    """Return the largest multiple of `unit` not above `value`."""
    return value - value % unit


def align_up(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` not below `value`."""
    return ceil_div(value, unit) * unit


def parse_bytes(size: float | str, *, option: str = "size") -> int:
    """Read a size in bytes: a number, or text such as "512MiB", "2GB" or "1.5g" (K, M,
    G and T alone are binary). Raises ConfigError."""
    if isinstance(size, int | float) and not isinstance(size, bool) and abs(size) < _MAX_BYTES:
        num_bytes = int(size)
    else:
        match = _SIZE.match(size) if isinstance(size, str) else None
        if match is None or match[2].lower() not in _UNITS or len(match[1]) > _MAX_DIGITS:
            raise ConfigError(
                f'{option}={size!r:.80} is not a size; give bytes or text such as "512MiB" or "2GB"'
            )
        num_bytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if num_bytes <= 0:
        raise ConfigError(f"{option}={size!r} must be above zero")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Return a size for people: `format_bytes(1536) == "1.5 KiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
