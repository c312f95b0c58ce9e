"""When an engine counts as lost, by times alone."""

from __future__ import annotations

import pytest

from quire.engine.process.messages import Heartbeat
from quire.engine.process.watch import LOADING_SILENCE_S, Watch, WatchConfig
from quire.errors import ConfigError


def _loaded(**options: float) -> Watch:
    watch = Watch(WatchConfig(**options))  # type: ignore[arg-type]
    watch.start(100.0)
    watch.is_loaded = True
    return watch


def test_silence_is_a_complaint_and_idleness_is_none() -> None:
    watch = _loaded(silence_timeout_s=10.0)
    for second in range(100, 1000):
        watch.hear(Heartbeat(num_steps=5), float(second))
        assert watch.complaint(second + 0.5) is None
    assert watch.complaint(1008.9) is None
    assert "no sign of life" in str(watch.complaint(1009.5))


def test_a_step_without_end_is_a_complaint_though_there_are_signs_of_life() -> None:
    watch = _loaded(step_timeout_s=60.0)
    for age in range(60):
        watch.hear(Heartbeat(num_steps=5, step_age_s=float(age)), 200.0 + age)
        assert watch.complaint(200.0 + age) is None
    watch.hear(Heartbeat(num_steps=5, step_age_s=61.0), 261.0)
    assert "one step" in str(watch.complaint(261.0))


def test_loading_may_be_silent_for_longer_but_not_for_ever() -> None:
    watch = Watch(WatchConfig(silence_timeout_s=1.0, load_timeout_s=300.0))
    watch.start(0.0)
    assert watch.complaint(LOADING_SILENCE_S - 1) is None
    assert watch.complaint(LOADING_SILENCE_S + 1) is not None
    watch.hear(Heartbeat(), 299.0)
    assert watch.complaint(299.5) is None
    assert "not loaded" in str(watch.complaint(301.0))


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
