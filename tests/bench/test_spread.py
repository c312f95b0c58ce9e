"""Percentiles are values that occurred."""

from __future__ import annotations

from quire.bench.spread import spread


def test_percentiles_are_nearest_ranks() -> None:
    assert spread([float(value) for value in range(1, 101)]) == {
        "mean": 50.5,
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
    }
    assert spread([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert spread([]) is None
    assert spread([2.0, 1.0], (1, 100)) == {"mean": 1.5, "p1": 1.0, "p100": 2.0}
