"""Prometheus metrics of each replica, where there are several. What all have together is in the
other metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.front.client import Client
from quire.engine.front.status import EngineStatus

_LABELS = ("model_name", "engine")
_GAUGES: Mapping[str, tuple[str, Callable[[EngineStatus], float]]] = {
    "replica_ready": ("1 where it serves requests.", lambda each: float(each.is_ready)),
    "replica_requests_in_flight": ("Requests that it has.", lambda each: each.num_requests),
    "replica_requests_running": ("Sequences that it computes.", lambda each: each.num_running),
    "replica_requests_waiting": ("Sequences that wait there.", lambda each: each.num_waiting),
    "replica_kv_cache_usage_perc": ("Share of its KV blocks.", lambda each: each.kv_usage),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[EngineStatus], float]]] = {
    "replica_restarts": ("Processes that were replaced.", lambda each: each.num_restarts),
    "replica_generation_tokens": (
        "Tokens of the process that runs now.",
        lambda each: each.num_generated_tokens,
    ),
    "replica_prefix_cache_hits": (
        "Prompt tokens found in its cache.",
        lambda each: each.num_prefix_hit_tokens,
    ),
}


class ReplicaMetrics(Collector):
    """Read at each scrape; labelled with the replica's number, as vLLM's are."""

    def __init__(self, prefix: str, model_name: str, client: Client) -> None:
        self._prefix, self._model, self._client = prefix, model_name, client

    def collect(self) -> Iterable[Metric]:
        """Return everything as of now; nothing of a single engine."""
        replicas = self._client.status().replicas
        if not replicas:
            return
        for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, read) in metrics.items():
                family = kind(f"{self._prefix}:{name}", text, labels=_LABELS)
                for number, status in enumerate(replicas):
                    family.add_metric((self._model, str(number)), read(status))
                yield family
