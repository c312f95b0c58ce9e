"""Prometheus metrics: what vLLM's dashboards know, under `quire:` (or `vllm:`), for all that exists
here.

Owns one registry per server. Tokens are counted as they come, also those of requests that end
early; histograms are fed as requests end well; gauges are read from the engine's status when
they are read. Labels are the model's name, a tenant's name from the operator's file, or a fixed
word: never what a client sent, so their number is bounded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.core.params import SamplingParams
from quire.engine.front.client import Client
from quire.engine.front.outputs import RequestOutput
from quire.server.ops.live_metrics import LiveMetrics
from quire.server.ops.replica_metrics import ReplicaMetrics
from quire.server.quota.admission import AdmissionControl

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0,
)  # fmt: skip
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_PER_TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_COUNT = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
)
_SMALL = (1, 2, 5, 10, 20, 50, 100, 128)
_LAG_S = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Between two outputs of a stream.", _PER_TOKEN_S),
    "request_time_per_output_token_seconds": (
        "Mean time per output token after the first.",
        _PER_TOKEN_S,
    ),
    "e2e_request_latency_seconds": ("From arrival to the end.", _LATENCY_S),
    "request_queue_time_seconds": ("From arrival to the first step.", _LATENCY_S),
    "request_inference_time_seconds": ("From the first step to the end.", _LATENCY_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", _LATENCY_S),
    "request_decode_time_seconds": ("From the first token to the last.", _LATENCY_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _COUNT),
    "request_generation_tokens": ("Output tokens of a request.", _COUNT),
    "request_max_num_generation_tokens": ("Output tokens of a request's longest sequence.", _COUNT),
    "request_params_n": ("The parameter n.", _SMALL),
    "request_params_max_tokens": ("The parameter max_tokens.", _COUNT),
    "request_num_preemptions": ("Preemptions of a request.", (0, *_SMALL)),
    "event_loop_lag_seconds": (
        "How late the server's event loop runs what is due, looked at 20 times a second.",
        _LAG_S,
    ),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens whose KV was computed, not found in the cache.",
        _COUNT,
    ),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens.",
    "prompt_tokens_cached": "Prompt tokens that the prefix cache held.",
    "prompt_tokens_cache_write": "Prompt tokens that the prefix cache holds since.",
    "generation_tokens": "Output tokens.",
}
_SAME = {
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prompt_tokens_cached", "Prompt tokens found there."),
}
"""What vLLM counts apart, and is the same here: every prompt is looked up as a whole."""
_REASONS = ("stop", "length", "repetition", "abort", "error")
"""Shown from the start, since the step from nothing to one is no rate."""


NOT_FINITE_CODE = "not_finite"
"""The code of failures whose cause is that the model's numbers were not finite."""


class Metrics:
    """All metrics of one server."""

    def __init__(
        self, prefix: str, model_name: str, client: Client, admission: AdmissionControl
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = model_name
        registry, label = self._registry, ("model_name",)
        self._histograms = {
            name: _TokenHistogram(buckets) for name, (_, buckets) in _HISTOGRAMS.items()
        }
        self._counts = dict.fromkeys(_COUNTERS, 0)
        text = "Sequences that ended, by reason."
        self._success = Counter(
            f"{prefix}:request_success", text, ("model_name", "finished_reason"), registry=registry
        )
        for reason in _REASONS:
            self._success.labels(model_name, reason)
        text = "Requests that ended because the model's numbers were not finite."
        self._corrupted = Counter(
            f"{prefix}:corrupted_requests", text, label, registry=registry
        ).labels(model_name)
        text = "Requests that ended with an error, by code."
        self._failures = Counter(
            f"{prefix}:request_failures", text, ("model_name", "code"), registry=registry
        )
        labels = ("method", "handler")
        self._http = Counter(
            f"{prefix}:http_requests", "HTTP exchanges.", (*labels, "status"), registry=registry
        )
        name, text = (
            f"{prefix}:http_request_duration_seconds",
            "From a request's headers to the end of its answer.",
        )
        self._http_duration = Histogram(name, text, labels, buckets=_LATENCY_S, registry=registry)
        self._http_children: dict[
            tuple[str, str, int], tuple[Callable[[], None], Callable[[float], None]]
        ] = {}
        """To look a metric up by its labels costs as much as to count;
        these are as few as the metric's."""
        self._registry.register(LiveMetrics(prefix, model_name, client, admission))
        self._registry.register(ReplicaMetrics(prefix, model_name, client))
        self._registry.register(_Histograms(prefix, model_name, self._histograms))
        self._registry.register(_Counts(prefix, model_name, self._counts))

    def add(self, collector: Collector) -> None:
        """Show what another component keeps, too."""
        self._registry.register(collector)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def http_finished(self, method: str, path: str, status: int, elapsed_s: float) -> None:
        """Count one HTTP exchange; `path` is a route's pattern, `method` one of few words."""
        kind = (method, path, status)
        children = self._http_children.get(kind)
        if children is None:
            counter, duration = (
                self._http.labels(method, path, str(status)),
                self._http_duration.labels(method, path),
            )
            children = self._http_children[kind] = (counter.inc, duration.observe)
        count, observe = children
        count()
        observe(elapsed_s)

    def inter_token(self, elapsed_s: float) -> None:
        """Time between two outputs of one stream."""
        self._histograms["inter_token_latency_seconds"].observe(elapsed_s)

    def event_loop_lag(self, lag_s: float) -> None:
        """Observe how late the event loop was."""
        self._histograms["event_loop_lag_seconds"].observe(lag_s)

    def request_failed(self, code: str) -> None:
        """Count a generation that ended with an error; `code` is one of a fixed set."""
        self._failures.labels(self._model, code).inc()
        if code == NOT_FINITE_CODE:
            self._corrupted.inc()

    def prompt_computed(self, output: RequestOutput) -> None:
        """Count a request's prompt, which is in the KV cache: its first output is there."""
        counts = self._counts
        counts["prompt_tokens"] += len(output.prompt_token_ids)
        counts["prompt_tokens_cached"] += output.num_cached_tokens
        counts["prompt_tokens_cache_write"] += output.num_cache_write_tokens

    def generated(self, num_tokens: int) -> None:
        """Output tokens came: a stream's as they are made, others at their end."""
        self._counts["generation_tokens"] += num_tokens

    def sequences_ended(self, reason: str, count: int = 1) -> None:
        """Sequences ended; `reason` is one of our own words."""
        self._success.labels(self._model, reason).inc(count)

    def request_finished(
        self, output: RequestOutput, params: SamplingParams, num_output_tokens: int, longest: int
    ) -> None:
        """Book the end of a request that went well."""
        metrics, histograms = output.metrics, self._histograms
        num_prompt, num_cached = len(output.prompt_token_ids), metrics.num_prefix_hit_tokens
        for name, value in (
            ("request_prompt_tokens", num_prompt),
            ("request_generation_tokens", num_output_tokens),
            ("request_max_num_generation_tokens", longest),
            ("request_params_n", params.n),
            ("request_params_max_tokens", params.max_tokens),
            ("request_num_preemptions", metrics.num_preemptions),
            ("request_prefill_kv_computed_tokens", num_prompt - num_cached),
        ):
            if value is not None:
                histograms[name].observe(value)
        for name, duration_s in _durations(output, longest):
            histograms[name].observe(duration_s)


def _durations(output: RequestOutput, longest: int) -> Iterator[tuple[str, float]]:
    """Histogram names and seconds, for the moments that were reached."""
    times = output.metrics
    arrival, scheduled, first, last = (
        times.arrival_s,
        times.first_scheduled_s,
        times.first_token_s,
        times.last_token_s,
    )
    end = times.finished_s if times.finished_s is not None else last
    if end is not None:
        yield "e2e_request_latency_seconds", max(0.0, end - arrival)
    if scheduled is not None:
        yield "request_queue_time_seconds", max(0.0, scheduled - arrival)
        if end is not None:
            yield "request_inference_time_seconds", max(0.0, end - scheduled)
        if first is not None:
            yield "request_prefill_time_seconds", max(0.0, first - scheduled)
    if first is not None:
        yield "time_to_first_token_seconds", max(0.0, first - arrival)
        if last is not None:
            yield "request_decode_time_seconds", max(0.0, last - first)
            if longest > 1:
                yield (
                    "request_time_per_output_token_seconds",
                    max(0.0, last - first) / (longest - 1),
                )


class _TokenHistogram:
    """A histogram that one thread feeds, at every token: prometheus_client's takes two locks and
    goes through its buckets one by one, which is 4 us of the 100 or so that a token costs.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, each alone; the last is for what is beyond all bounds."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets as Prometheus has them: each with all that is below its bound."""
        return list(
            zip(
                map(floatToGoString, (*self.bounds, math.inf)), accumulate(self.counts), strict=True
            )
        )


class _Histograms(Collector):
    """All of them, when they are read."""

    def __init__(
        self, prefix: str, model_name: str, histograms: Mapping[str, _TokenHistogram]
    ) -> None:
        self._prefix = prefix
        self._model = model_name
        self._histograms = histograms

    def collect(self) -> Iterable[Metric]:
        """As of now."""
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(
                f"{self._prefix}:{name}", _HISTOGRAMS[name][0], labels=("model_name",)
            )
            family.add_metric((self._model,), histogram.buckets(), histogram.total)
            yield family


class _Counts(Collector):
    """Counts of tokens, which grow with every one of them: as the histograms,
    without prometheus_client's locks."""

    def __init__(self, prefix: str, model_name: str, counts: Mapping[str, int]) -> None:
        self._prefix = prefix
        self._model = model_name
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """As of now."""
        texts = {name: (name, text) for name, text in _COUNTERS.items()} | _SAME
        for name, (counted, text) in texts.items():
            family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
            family.add_metric((self._model,), self._counts[counted])
            yield family
        num_cached = self._counts["prompt_tokens_cached"]
        text = "Prompt tokens, by where their KV came from."
        family = CounterMetricFamily(
            f"{self._prefix}:prompt_tokens_by_source", text, labels=("model_name", "source")
        )
        family.add_metric(
            (self._model, "local_compute"), self._counts["prompt_tokens"] - num_cached
        )
        family.add_metric((self._model, "local_cache_hit"), num_cached)
        yield family
