"""A Ray cluster of several nodes on this machine, each a raylet of its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OBJECT_STORE_BYTES = 80 << 20
"""Of each node; the least that Ray takes is 75 MiB."""


@contextmanager
def ray_cluster(num_nodes: int, num_cpus: int = 1) -> Iterator[Any]:
    """Nodes of so many CPUs, and one without, at which the cluster is reached. Skips where Ray is
    not installed. What Ray itself does with sockets and files is not this project's to warn of."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'quire-llm[ray]'")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would look for a server of Ray's makers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster

        sizes = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**sizes, "num_cpus": 0, "include_dashboard": False},
        )
        try:
            for _ in range(num_nodes):
                cluster.add_node(**sizes)
            ray.init(address=cluster.address, log_to_driver=False, namespace="quire")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
