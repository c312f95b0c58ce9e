"""A set of numbers in a few: mean and percentiles, by nearest rank,
so that each is a value that occurred."""

from __future__ import annotations

from collections.abc import Sequence

PERCENTILES = (50, 90, 99)


def spread(
    values: Sequence[float], percentiles: Sequence[int] = PERCENTILES
) -> dict[str, float] | None:
    """Mean and percentiles; None where there is nothing."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in percentiles}
    return {"mean": sum(ordered) / len(ordered), **ranks}
