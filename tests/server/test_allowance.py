"""Buckets of a minute's requests or tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.quota.allowance import Allowance, duration


@given(
    st.integers(1, 10**9),
    st.lists(st.tuples(st.floats(0, 100), st.integers(-500, 500)), max_size=20),
)
def test_a_bucket_is_never_more_than_full_and_after_its_wait_there_is_enough(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    now = 5.0
    bucket = Allowance(per_minute, now)
    for pause_s, amount in steps:
        now += pause_s
        bucket.use(amount)
        assert bucket.left(now) <= per_minute
        wait_s = bucket.wait_s(1, now)
        assert (wait_s == 0) == (bucket.left(now) >= 1)
        now += wait_s + 1e-6
        assert bucket.left(now) >= 1 - 1e-6 * per_minute - 1e-6


def test_without_a_limit_nothing_is_counted() -> None:
    bucket = Allowance(None, 0.0)
    bucket.use(10**9)
    assert bucket.wait_s(10**9, 1.0) == 0 and bucket.headers("tokens", 1.0) == {}


def test_headers_say_when_all_of_it_is_back() -> None:
    bucket = Allowance(600, 0.0)
    bucket.use(650)
    assert bucket.headers("tokens", 1.0) == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m4s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0001, "1ms"),
        (0.017, "17ms"),
        (7.66, "7.66s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (360.2, "6m1s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
