"""The circuit breaker, on a clock of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.router.health import FIRST_WAIT_S, MAX_FAILURES, MAX_WAIT_S, Breaker, BreakerState


def test_failures_in_a_row_open_it_and_one_trial_at_a_time_may_close_it() -> None:
    breaker = Breaker()
    for _ in range(MAX_FAILURES - 1):
        assert not breaker.fail(0.0)
    breaker.succeed()
    for _ in range(MAX_FAILURES - 1):
        assert not breaker.fail(0.0)
    assert breaker.fail(0.0) and not breaker.may_send(0.5)
    assert breaker.wait_s(0.25) == FIRST_WAIT_S - 0.25
    assert breaker.state(FIRST_WAIT_S) is BreakerState.HALF_OPEN and breaker.may_send(FIRST_WAIT_S)
    breaker.send(FIRST_WAIT_S)
    assert not breaker.may_send(FIRST_WAIT_S + 1)
    assert not breaker.fail(FIRST_WAIT_S + 1)  # it was not closed
    assert not breaker.may_send(FIRST_WAIT_S + 2) and breaker.may_send(FIRST_WAIT_S + 3)
    breaker.send(9.0)
    breaker.succeed()
    assert breaker.state(9.0) is BreakerState.CLOSED and breaker.wait_s(9.0) == 0.0


def test_what_is_certain_opens_it_at_once_and_a_probe_brings_the_trial_forward() -> None:
    breaker = Breaker()
    assert breaker.fail(5.0, is_certain=True) and not breaker.may_send(5.1)
    breaker.retry(5.1)
    assert breaker.may_send(5.1)
    breaker.send(5.1)
    breaker.cancel()  # its client left: the next one may try
    assert breaker.may_send(5.1)


@given(st.lists(st.sampled_from(["fail", "certain", "send", "succeed", "cancel", "retry", "wait"])))
def test_it_never_keeps_a_replica_out_for_longer_than_it_may(events: list[str]) -> None:
    breaker, now = Breaker(), 0.0
    for event in events:
        if event == "wait":
            now += 0.7
        elif event == "send":
            if breaker.may_send(now):
                breaker.send(now)
        elif event in ("fail", "certain"):
            breaker.fail(now, is_certain=event == "certain")
        elif event == "retry":
            breaker.retry(now)
        else:
            getattr(breaker, event)()
        assert 0 <= breaker.wait_s(now) <= MAX_WAIT_S
        assert breaker.may_send(now + 2 * MAX_WAIT_S)
