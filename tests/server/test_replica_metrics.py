"""What is shown of each of several replicas."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from fake_client import FakeClient
from servers import serve

from quire.engine.front.status import EngineStatus


class TwoReplicas(FakeClient):
    """One that is ready, and one that is being replaced."""

    def status(self) -> EngineStatus:
        ready = EngineStatus(state="ready", num_requests=3, num_running=2)
        lost = EngineStatus(state="restarting", num_restarts=1)
        return msgspec.structs.replace(super().status(), replicas=(ready, lost))


def test_each_replica_has_a_line_of_its_own() -> None:
    with serve(TwoReplicas()) as server:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        found = {
            line.split("{")[0]: line.rsplit(" ", 1)[1] for line in lines if 'engine="1"' in line
        }
        assert found["quire:replica_ready"] == "0.0"
        assert found["quire:replica_restarts_total"] == "1.0"
        replicas = httpx.get(server.url + "/healthz/progress").json()["replicas"]
        assert [each["state"] for each in replicas] == ["ready", "restarting"]
        assert [each["num_requests"] for each in replicas] == [3, 0]


@pytest.mark.parametrize(
    ("replica", "status"), [(0, 200), (1, 200), (2, 404), (-1, 400), (64, 400)]
)
def test_steps_are_those_of_the_replica_that_is_named(replica: int, status: int) -> None:
    with serve(TwoReplicas()) as server:
        answer = httpx.get(server.url + f"/inspect/steps?replica={replica}")
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["replicas"] == ["ready", "restarting"]
            assert answer.json()["state"] == ["ready", "restarting"][replica]


def test_a_single_engine_has_no_such_lines() -> None:
    with serve(FakeClient()) as server:
        assert "replica_" not in httpx.get(server.url + "/metrics").text
        assert httpx.get(server.url + "/healthz/progress").json()["replicas"] == []
