"""Faults at random moments under 32 streams (`fault_rounds`). Two deployments are tried each time;
with QUIRE_TEST_KILLS=100 all of them, with so many faults each, from number QUIRE_TEST_FIRST_KILL
on."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployments import DEPLOYMENTS, deployed
from fault_rounds import IS_LONG, NUMBERS, endure
from ranks import needs_ranks

pytestmark = [pytest.mark.slow, needs_ranks]

USUAL = ("two ranks by sockets", "prefill and decode")
"""What has the most connections and kinds of processes: others are tried one by one elsewhere."""


@pytest.mark.parametrize("name", DEPLOYMENTS if IS_LONG else USUAL)
def test_faults_under_streams_lose_nothing_and_hang_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell(what: str) -> None:
        with capsys.disabled():
            print(f"{name}, {what}")

    with deployed(DEPLOYMENTS[name](tmp_path)) as deployment:
        endure(deployment, NUMBERS, tell)
