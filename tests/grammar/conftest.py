"""Verdicts on grammars, waited for however busy the machine is: what bounds them is processor
time."""

from __future__ import annotations

import pytest

from quire.grammar import judge, trial


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (judge, trial):
        monkeypatch.setattr(module, "MAX_WAIT_S", 200.0)
