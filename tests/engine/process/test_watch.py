"""When an engine counts as lost, by times alone."""

from __future__ import annotations

import pytest

from quire.engine.process.messages import Heartbeat
from quire.engine.process.watch import LOADING_SILENCE_S, Watch, WatchConfig
from quire.errors import ConfigError


class Watched:
    """A watch, and its clock, which is looked at ten times a second unless time leaps."""

    def __init__(self, **options: float) -> None:
        self.now_s = 100.0
        self.watch = Watch(WatchConfig(**options), lambda: self.now_s)  # type: ignore[arg-type]
        self.watch.start()

    def complaint_after(self, seconds: float) -> str | None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.1)
            complaint = self.watch.complaint()
        return complaint

    def leap(self, seconds: float) -> None:
        """Have time pass in which the watcher does not run."""
        self.now_s += seconds


def _loaded(**options: float) -> Watched:
    watched = Watched(**options)
    watched.watch.is_loaded = True
    return watched


def test_silence_is_a_complaint_and_idleness_is_none() -> None:
    watched = _loaded(silence_timeout_s=10.0)
    for _ in range(100):
        watched.watch.hear(Heartbeat(num_steps=5))
        assert watched.complaint_after(1.0) is None
    assert watched.complaint_after(8.9) is None
    assert "no sign of life" in str(watched.complaint_after(0.2))
    watched.watch.hear()
    assert watched.complaint_after(9.9) is None
    assert watched.watch.sign_age_s == pytest.approx(9.9)


def test_a_step_without_end_is_a_complaint_though_there_are_signs_of_life() -> None:
    watched = _loaded(step_timeout_s=60.0)
    for age in range(60):
        watched.watch.hear(Heartbeat(num_steps=5, step_age_s=float(age)))
        assert watched.complaint_after(0.9) is None
    watched.watch.hear(Heartbeat(num_steps=5, step_age_s=61.0))
    assert "one step" in str(watched.watch.complaint())


def test_loading_may_be_silent_for_longer_but_not_for_ever() -> None:
    watched = Watched(silence_timeout_s=1.0, load_timeout_s=300.0)
    assert watched.complaint_after(LOADING_SILENCE_S - 1) is None
    assert "no sign of life" in str(watched.complaint_after(2.0))
    for _ in range(298 - int(LOADING_SILENCE_S)):
        watched.watch.hear(Heartbeat())
        assert watched.complaint_after(1.0) is None
    watched.watch.hear(Heartbeat())
    assert "not loaded" in str(watched.complaint_after(2.0))


def test_time_in_which_the_watcher_was_stopped_is_not_held_against_the_engine() -> None:
    """As of a terminal's Ctrl-Z, or a container that was frozen with both in it."""
    watched = _loaded(silence_timeout_s=10.0, step_timeout_s=60.0)
    watched.watch.hear(Heartbeat(num_steps=5, step_age_s=50.0))
    watched.leap(3600.0)
    assert watched.complaint_after(5.0) is None
    assert "no sign of life" in str(watched.complaint_after(6.0)), "it is silent while watched"
    loading = Watched(load_timeout_s=300.0)
    loading.leap(3600.0)
    assert loading.complaint_after(LOADING_SILENCE_S - 1) is None


def test_restarts_come_at_once_then_slower_then_never() -> None:
    watch = Watch(WatchConfig(max_restarts=4, first_pause_s=1.0, max_pause_s=3.0))
    assert [watch.pause_s() for _ in range(5)] == [0.0, 1.0, 2.0, 3.0, None]
    watch.note_progress()
    assert watch.pause_s() == 0.0


@pytest.mark.parametrize(
    "options", [{"silence_timeout_s": 0.0}, {"step_timeout_s": -1.0}, {"max_restarts": -1}]
)
def test_senseless_patience_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        WatchConfig(**options)  # type: ignore[arg-type]
