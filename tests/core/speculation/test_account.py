"""What drafting has earned: only tokens that were saved count as earnings."""

from __future__ import annotations

import pytest

from quire.core.speculation.account import NO_GAIN, DraftAccount, Gain

ESTIMATE_S = 0.001


class Clock:
    """Settles steps one after the other, each of which takes as long as it is told to."""

    def __init__(self) -> None:
        self.account, self.step_id, self.now = DraftAccount(), 0, 0.0

    def step(self, seconds: float, gain: Gain = NO_GAIN, *, is_active: bool = True) -> None:
        """A step of one row; an active one looks for drafts."""
        if is_active:
            self.account.look(self.step_id, 1, 0, ESTIMATE_S, 1.0)
        self.now += seconds
        self.account.settle(self.step_id, 1, gain, self.now)
        self.step_id += 1

    def measure_plain(self, seconds: float) -> None:
        """So many plain steps that their pace is known."""
        self.step(seconds, is_active=False)
        end = self.account.hold(self.step_id, 1, 0, ESTIMATE_S)
        self.step(seconds, is_active=False)
        while self.step_id < end:
            self.step(seconds, is_active=False)

    def num_lost(self, most: int) -> int:
        """How many drafts are made that cost a step each and are all wrong."""
        for count in range(most):
            if self.step_id < self.account.wakes:
                return count
            self.step(2 * ESTIMATE_S, Gain(0, 0.0))
        return most


@pytest.mark.parametrize("plain_s", [ESTIMATE_S, 1.3 * ESTIMATE_S, 2.0 * ESTIMATE_S])
def test_steps_without_drafts_earn_nothing_however_slow_plain_ones_were(plain_s: float) -> None:
    """Plain steps that were measured while the machine was busy make all others look fast."""
    clock = Clock()
    clock.measure_plain(plain_s)
    for _ in range(150):
        clock.step(ESTIMATE_S)
    assert not clock.account.has_earned
    # where plain steps count as twice as long, a wrong draft seems to cost nothing
    assert clock.account.credit <= 2.0
    if plain_s == ESTIMATE_S:
        assert clock.num_lost(50) <= 4


def test_tokens_that_were_saved_pay_for_drafts_that_are_wrong_later() -> None:
    clock = Clock()
    clock.measure_plain(ESTIMATE_S)
    for _ in range(12):
        clock.step(1.2 * ESTIMATE_S, Gain(3, 3.0))
    assert clock.account.has_earned
    assert 20 < clock.num_lost(80) < 80
