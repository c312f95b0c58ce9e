"""The cycle collector of a process that serves."""

from __future__ import annotations

import gc

import pytest

from quire.common import garbage


class _Knot:
    def __init__(self) -> None:
        self.me = self


def test_what_stays_is_not_looked_at_again_and_what_comes_later_is_collected() -> None:
    thresholds = gc.get_threshold()
    try:
        garbage.settle()
        assert gc.get_freeze_count() > 1000
        assert gc.isenabled()
        assert len(gc.get_objects()) < 1000
        _Knot()
        assert gc.collect() >= 1
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_meanwhile_and_as_before_afterwards(was_enabled: bool) -> None:
    try:
        if not was_enabled:
            gc.disable()
        with pytest.raises(ZeroDivisionError), garbage.uncollected():
            assert not gc.isenabled()
            _ = 1 / 0
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
