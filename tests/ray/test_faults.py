"""Faults at random moments under 32 streams (`fault_rounds`) where a rank runs on a node of a Ray
cluster: of the server, its engine, the rank, the worker of Ray's that holds it, and connections."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from deployments import DIVIDED, Deployment, deployed, server
from fault_rounds import NUMBERS, endure
from ranks import needs_ranks
from ray_clusters import ray_cluster
from served import until

pytestmark = [
    needs_ranks, pytest.mark.slow, pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("default"),
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(num_nodes=3) as found:
        yield found


class RayDeployment(Deployment):
    """A server with two ranks; the second one's process, and the worker that has started it, belong
    to a node of the cluster."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        by_ray = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", *DIVIDED)
        super().__init__(server("server", folder, *by_ray)[0])
        self._cluster = cluster

    def processes(self) -> dict[str, int]:
        """All by name, but those of Ray that do no work for the server."""
        found, numbers = super().processes(), itertools.count()
        nodes = [node.all_processes["raylet"] for node in self._cluster.worker_nodes]
        for pid in (
            pid for node in nodes for each in node for pid in faults.tree(each.process.pid)
        ):
            command = faults.arguments(pid)
            if "quire.engine.ranks" in command:
                found[f"ray rank {next(numbers)}"] = pid
            elif any("RankActor" in each for each in command):
                found[f"ray worker {next(numbers)}"] = pid
        return found

    def await_whole(self) -> None:
        """Wait for Ray as well, which takes a while to end the worker of a rank that is lost."""
        super().await_whole()
        until(self._has_one_rank)
        super().await_whole()

    def _has_one_rank(self) -> bool:
        """Whether there are a rank and its worker, and no others. An engine that has nothing to
        compute notices with its next step that a rank of Ray's is lost."""
        with self.front.served.client() as client:
            client.post("/v1/completions", json={"prompt": "One", "max_tokens": 1})
        return sum(name.startswith("ray ") for name in self.processes()) == 2

    def exposed(self) -> list[str]:
        """Addresses that other machines can reach, but those of Ray, which listens in each driver,
        here the engine, and in each worker."""
        found = self.processes().items()
        return faults.exposed(pid for name, pid in found if name == "server" or "rank" in name)

    def is_lasting(self, name: str) -> bool:
        """A worker has nothing to do while its rank computes."""
        return "worker" in name


def test_faults_of_ranks_on_ray_lose_nothing_and_hang_nothing(
    cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def tell(what: str) -> None:
        with capsys.disabled():
            print(f"two ranks on Ray, {what}")

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with deployed(RayDeployment(cluster, tmp_path)) as deployment:
        assert any(name.startswith("ray rank") for name in deployment.processes())
        endure(deployment, NUMBERS, tell)
