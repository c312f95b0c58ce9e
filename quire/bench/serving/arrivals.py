"""Arrival times of requests: a rate that may change, with gaps as regular or as bursty as
requested.

Owns no clock: gives moments in seconds from the start. Times are drawn at unit rate and then scaled
by the inverse of the cumulative rate, so that one rule serves constant rates and ramps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A pattern of arrivals. Rates in requests a second."""

    rate: float = math.inf
    """At the start; infinite sends all at once."""
    end_rate: float | None = None
    """At the end of the run, where the rate changes linearly."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps, whose mean keeps to the rate: 1 is a Poisson
    process, below 1 comes in bursts, infinity is a metronome. The variation of the gaps (deviation
    over mean) is 1 / sqrt(burstiness).
    """

    def __post_init__(self) -> None:
        if not self.rate > 0 or (self.end_rate is not None and not 0 < self.end_rate < math.inf):
            raise ConfigError("a request rate must be above 0")
        if self.end_rate is not None and self.rate == math.inf:
            raise ConfigError("a ramp begins at a finite rate")
        if not self.burstiness > 0:
            raise ConfigError(
                f"burstiness={self.burstiness:g} must be above 0 (1 is Poisson, inf is regular)"
            )

    def times(self, count: int, seed: int) -> list[float]:
        """Return the moments of `count` requests, the first at 0."""
        if self.rate == math.inf:
            return [0.0] * count
        end_rate = self.rate if self.end_rate is None else self.end_rate
        whole_s = 2 * count / (self.rate + end_rate)
        slope = (end_rate - self.rate) / whole_s
        return [
            _inverse(due, self.rate, slope) for due in self._unit_times(count, random.Random(seed))
        ]

    def _unit_times(self, count: int, rng: random.Random) -> Iterator[float]:
        now = 0.0
        for _ in range(count):
            yield now
            now += (
                1.0
                if self.burstiness == math.inf
                else rng.gammavariate(self.burstiness, 1 / self.burstiness)
            )


def replayed(times: Sequence[float], speed_up: float) -> list[float]:
    """Return a trace's arrivals, from its first on, `speed_up` times as fast."""
    if not 0 < speed_up < math.inf:
        raise ConfigError(f"speed_up={speed_up:g} must be above 0")
    return [(each - times[0]) / speed_up for each in times]


def _inverse(count: float, rate: float, slope: float) -> float:
    """Return when `count` requests have come: t of rate * t + slope * t**2 / 2 = count.

    A falling rate reaches its last request at the ramp's end; what chance puts after it goes on at
    the lowest rate.
    """
    if slope == 0:
        return count / rate
    root = rate * rate + 2 * slope * count
    if root <= 0:
        return -rate / slope
    return (math.sqrt(root) - rate) / slope
