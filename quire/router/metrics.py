"""Prometheus metrics of the router, under `quire:router_`.

Labels are back ends' URLs, which the operator gave, or fixed words; never what a client sent. What
the fleet counts is read at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.router.fleet import Fleet
from quire.router.health import BreakerState
from quire.server.quota.admission import AdmissionControl

_PREFIX = "quire:router"
_SECONDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_GAUGES = {
    "backend_up": "1 where requests are sent, 0.5 where one may try, 0 else.",
    "backend_requests_in_flight": "Requests on their way at a back end.",
    "backend_tokens_in_flight": "The same in prompt tokens, as the policies weigh them.",
    "backend_draining": "1 where nothing more is sent.",
}
_COUNTERS = {
    "backend_prompt_tokens": "Prompt tokens sent to a back end, estimated.",
    "backend_prompt_tokens_cached": "Of them, those that it should have cached.",
}


class RouterMetrics:
    """One registry per router."""

    def __init__(self, fleet: Fleet, admission: AdmissionControl) -> None:
        self._registry = CollectorRegistry()
        self._http = Counter(
            f"{_PREFIX}_http_requests",
            "HTTP requests, by what they came to.",
            ("method", "handler", "status"),
            registry=self._registry,
        )
        self._duration = Histogram(
            f"{_PREFIX}_http_request_duration_seconds",
            "From a request's headers to the end of its answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first_byte = Histogram(
            f"{_PREFIX}_first_byte_seconds",
            "From sending a request to the first byte of the answer that was forwarded.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._retries = Counter(
            f"{_PREFIX}_retries", "Requests sent to a further back end.", registry=self._registry
        )
        self._registry.register(_Live(fleet, admission))

    def watch_prefill(self, outcomes: Callable[[], Mapping[str, int]]) -> None:
        """Report prompts that were sent to prefill back ends, by what came of it."""
        self._registry.register(_Prefill(outcomes))

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def http_finished(self, method: str, path: str, status: int, elapsed_s: float) -> None:
        """Count one exchange with a client."""
        self._http.labels(method, path, str(status)).inc()
        self._duration.observe(elapsed_s)

    def sent(self, *, is_retry: bool) -> None:
        """Count a request that is sent to a back end."""
        if is_retry:
            self._retries.inc()

    def first_byte(self, elapsed_s: float) -> None:
        """Note how long a back end took to begin its answer."""
        self._first_byte.observe(elapsed_s)


class _Prefill(Collector):
    def __init__(self, outcomes: Callable[[], Mapping[str, int]]) -> None:
        self._outcomes = outcomes

    def collect(self) -> Iterable[Metric]:
        """Return everything as of now."""
        family = CounterMetricFamily(
            f"{_PREFIX}_prefills", "Prompts sent to prefill back ends.", labels=("outcome",)
        )
        for outcome, count in self._outcomes().items():
            family.add_metric((outcome,), count)
        yield family


class _Live(Collector):
    def __init__(self, fleet: Fleet, admission: AdmissionControl) -> None:
        self._fleet = fleet
        self._admission = admission

    def collect(self) -> Iterable[Metric]:
        """Return everything as of now."""
        up = {BreakerState.CLOSED: 1.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 0.0}
        gauges = {
            name: GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=("backend",))
            for name, text in _GAUGES.items()
        }
        counters = {
            name: CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=("backend",))
            for name, text in _COUNTERS.items()
        }
        outcomes = CounterMetricFamily(
            f"{_PREFIX}_backend_requests",
            "Requests that ended at a back end, by how.",
            labels=("backend", "outcome"),
        )
        for replica in self._fleet.replicas:
            label = (replica.name,)
            values = (
                up[self._fleet.state(replica)],
                replica.load.num_requests,
                replica.load.tokens,
                float(replica.is_draining),
            )
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric(label, value)
            totals = (replica.num_prompt_tokens, replica.num_cached_tokens)
            for counter, total in zip(counters.values(), totals, strict=True):
                counter.add_metric(label, total)
            for outcome, count in sorted(replica.num_by_outcome.items()):
                outcomes.add_metric((replica.name, outcome), count)
        yield from (*gauges.values(), *counters.values(), outcomes)
        yield GaugeMetricFamily(
            f"{_PREFIX}_requests_in_flight",
            "Requests that have not ended.",
            value=self._admission.num_in_flight,
        )
        refused = CounterMetricFamily(
            f"{_PREFIX}_rejections", "Requests refused by limits.", labels=("reason",)
        )
        for reason, count in self._admission.num_rejections.items():
            refused.add_metric((reason,), count)
        yield refused
