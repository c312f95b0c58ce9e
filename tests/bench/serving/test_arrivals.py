"""Arrivals keep to their rate, their regularity and their ramp."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from quire.bench.serving.arrivals import Arrivals, replayed
from quire.errors import ConfigError


def gaps(arrivals: Arrivals, count: int = 20_000) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(arrivals.times(count, 1))]


@pytest.mark.parametrize(
    ("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25), (math.inf, 0.0)]
)
def test_gaps_have_the_rates_mean_and_the_burstinesss_variation(
    burstiness: float, variation: float
) -> None:
    found = gaps(Arrivals(5.0, burstiness=burstiness))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_a_ramp_begins_and_ends_at_its_rates() -> None:
    times = Arrivals(2.0, 18.0, math.inf).times(1000, 0)
    assert times[0] == 0 and times[-1] == pytest.approx(100, rel=0.01)
    assert 10 / (times[10] - times[0]) == pytest.approx(2.0, rel=0.3)
    assert 100 / (times[-1] - times[-101]) == pytest.approx(18.0, rel=0.05)
    falling = Arrivals(18.0, 2.0).times(1000, 3)
    assert falling == sorted(falling) and all(math.isfinite(each) for each in falling)


def test_seeds_and_bursts_at_once() -> None:
    assert Arrivals(5.0).times(50, 1) == Arrivals(5.0).times(50, 1) != Arrivals(5.0).times(50, 2)
    assert Arrivals().times(3, 0) == [0.0, 0.0, 0.0]
    assert replayed([10.0, 12.0, 16.0], 4.0) == [0.0, 0.5, 1.5]


@pytest.mark.parametrize(
    "bad", [(0.0,), (-1.0,), (1.0, 0.0), (math.inf, 2.0), (1.0, None, 0.0), (math.nan,)]
)
def test_what_is_no_pattern_is_refused(bad: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        Arrivals(*bad)
    with pytest.raises(ConfigError):
        replayed([0.0], 0.0)
