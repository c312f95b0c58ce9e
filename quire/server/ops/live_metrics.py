"""Metrics of what other components keep, read from them at each scrape: gauges, and the counters of
the engine, the admission and the tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from quire.engine.front.client import Client
from quire.engine.front.status import EngineStatus
from quire.server.ops.transfer_metrics import staged_bytes, transfer_counts
from quire.server.quota.admission import AdmissionControl


def _num_tasks() -> float:
    """Return the number of the running loop's tasks; 0 without a loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


class LiveMetrics(Collector):
    """Gauges and counters that other components keep, read at each scrape."""

    def __init__(
        self, prefix: str, model_name: str, client: Client, admission: AdmissionControl
    ) -> None:
        self._prefix = prefix
        self._model = model_name
        self._client = client
        self._admission = admission

    def collect(self) -> Iterable[Metric]:
        """Return everything as of now."""
        status = self._client.status()
        yield from self._requests(status)
        yield from self._blocks(status)
        yield from self._stored_kv(status)
        yield self._gauge("kv_transfer_staged_bytes", *staged_bytes(status))
        yield from (self._counter(*each) for each in transfer_counts(status))
        yield from self._steps(status)
        yield self._cache_config()
        yield from self._speculation(status)
        yield from self._experts(status)
        yield from self._rejections()
        yield from self._by_tenant()

    def _requests(self, status: EngineStatus) -> Iterator[Metric]:
        """Who is served, who waits, and whether anyone can be."""
        admission = self._admission
        yield from (
            self._gauge(
                "num_requests_running", "Sequences that are computed now.", status.num_running
            ),
            self._gauge("num_requests_waiting", "Sequences that wait.", status.num_waiting),
            self._gauge(
                "num_tokens_waiting",
                "Prompt tokens of the requests that wait: what to scale on.",
                admission.queue()[1],
            ),
            self._gauge(
                "num_requests_in_flight", "Requests that have not ended.", admission.num_in_flight
            ),
            self._gauge("event_loop_tasks", "Tasks of the server's event loop.", _num_tasks()),
            self._gauge("engine_ready", "1 where new requests are served.", float(status.is_ready)),
            self._counter("num_preemptions", "Preemptions.", status.num_preemptions),
            self._counter("engine_restarts", "Engine processes replaced.", status.num_restarts),
            self._waiting_by_reason(status),
        )

    def _blocks(self, status: EngineStatus) -> Iterator[Metric]:
        """What becomes of KV blocks."""
        yield from (
            self._gauge(
                "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", status.kv_usage
            ),
            self._counter(
                "kv_blocks_evicted",
                "Cached blocks that were given to others.",
                status.num_evictions,
            ),
            self._counter(
                "kv_blocks_copied", "Blocks that were copied on write.", status.num_copies
            ),
            self._counter(
                "kv_blocks_merged",
                "Blocks that were merged with identical ones.",
                status.num_merges,
            ),
        )

    def _steps(self, status: EngineStatus) -> Iterator[Metric]:
        """How many steps there were, how large, and how long beside what was predicted."""
        yield from (
            self._counter("engine_steps", "Steps of the engine that runs now.", status.num_steps),
            self._gauge(
                "last_step_age_seconds",
                "Age of the last step while there is work.",
                status.last_step_age_s or 0.0,
            ),
            self._step_sizes(status),
            self._step_durations(status),
            self._gauge(
                "step_target_seconds",
                "How long a step should take; 0 for any time.",
                status.target_step_s,
            ),
            self._counter(
                "step_predicted_seconds", "Predicted durations of steps.", status.predicted_step_s
            ),
            self._counter(
                "step_misjudged_seconds",
                "Amounts by which these were off.",
                status.misjudged_step_s,
            ),
        )

    def _rejections(self) -> Iterator[Metric]:
        name = f"{self._prefix}:admission_rejections"
        rejections = CounterMetricFamily(name, "Requests refused, by reason.", labels=("reason",))
        for reason, count in self._admission.num_rejections.items():
            rejections.add_metric((reason,), count)
        yield rejections

    def _speculation(self, status: EngineStatus) -> Iterator[Metric]:
        """What speculation came to, by vLLM's names."""
        name, by_place = "spec_decode_num_accepted_tokens", status.num_accepted_by_place
        text = "Rows of steps for which tokens were drafted."
        yield self._counter("spec_decode_num_drafts", text, status.num_drafts)
        text = "Draft tokens that were computed."
        yield self._counter("spec_decode_num_draft_tokens", text, status.num_draft_tokens)
        yield self._counter(name, "Draft tokens that were right.", sum(by_place))
        labels = ("model_name", "position")
        family = CounterMetricFamily(
            f"{self._prefix}:{name}_per_pos", "The same by position.", labels=labels
        )
        for place, count in enumerate(by_place):
            family.add_metric((self._model, str(place)), count)
        yield family

    def _experts(self, status: EngineStatus) -> Iterator[Metric]:
        """How experts were found, where only some are in memory."""
        text = "Experts that a layer needed in a step and that were in memory."
        yield self._counter("expert_hits", text, status.num_expert_hits)
        text = "Those that were read from their file."
        yield self._counter("expert_misses", text, status.num_expert_misses)
        text = "Bytes of experts that were read."
        yield self._counter("expert_read_bytes", text, status.expert_bytes_read)
        text = "Time that steps waited for experts."
        yield self._counter("expert_wait_seconds", text, status.expert_wait_s)
        text = "Missing experts that a layer would need, by forecasts of the layer before."
        yield self._counter("expert_forecasts", text, status.num_experts_forecast)
        text = "Those of them that it needed."
        yield self._counter("expert_forecasts_right", text, status.num_experts_foreseen)
        text = "Bytes of experts that were requested ahead."
        yield self._counter("expert_ahead_bytes", text, status.expert_bytes_ahead)

    def _stored_kv(self, status: EngineStatus) -> Iterator[Metric]:
        """What is kept besides the pool, in host memory or on disk."""
        yield self._gauge("kv_blocks_stored", "Blocks kept now.", status.num_stored_kv_blocks)
        yield self._gauge(
            "kv_storing_off",
            "1 where a disk has failed, so that nothing is kept.",
            float(status.is_kv_storing_off),
        )
        for name, text, value in (
            ("kv_blocks_kept", "Blocks that were stored.", status.num_kept_kv_blocks),
            ("kv_blocks_restored", "Blocks that were restored.", status.num_restored_kv_blocks),
            ("kv_blocks_faulty", "Damaged, and so computed.", status.num_faulty_kv_blocks),
            ("kv_fetches_late", "Reads that were given up.", status.num_late_kv_fetches),
            ("kv_bytes_written", "Bytes of KV written to disk.", status.num_kv_bytes_written),
            ("kv_bytes_read", "Bytes of KV read back.", status.num_kv_bytes_read),
        ):
            yield self._counter(name, text, value)

    def _waiting_by_reason(self, status: EngineStatus) -> Metric:
        """`deferred` waits for something that another sequence is computing, `capacity` for rows,
        memory or its turn."""
        name = f"{self._prefix}:num_requests_waiting_by_reason"
        family = GaugeMetricFamily(
            name, "Sequences that wait, by reason.", labels=("model_name", "reason")
        )
        family.add_metric((self._model, "capacity"), max(0, status.num_waiting - status.num_parked))
        family.add_metric((self._model, "deferred"), status.num_parked)
        return family

    def _step_sizes(self, status: EngineStatus) -> Metric:
        """Return the histogram that the scheduler keeps: steps by the power of
        two that bounds their tokens."""
        text = "Tokens computed in one step."
        return self._powers(
            "iteration_tokens_total",
            text,
            status.num_steps_by_size,
            1.0,
            status.num_computed_tokens,
        )

    def _step_durations(self, status: EngineStatus) -> Metric:
        """Return the same for the durations of steps that are bounded by time."""
        text = "Durations of steps, where they are bounded by time."
        return self._powers(
            "step_time_seconds", text, status.num_steps_by_duration, 0.001, status.measured_step_s
        )

    def _powers(
        self, name: str, text: str, counts: Sequence[int], unit: float, total: float
    ) -> Metric:
        """Return a histogram whose buckets end at `unit` times powers of two."""
        sums = list(accumulate(counts or (0,)))
        buckets = [
            (str(unit * (1 << place)), float(count)) for place, count in enumerate(sums[:-1])
        ]
        family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), [*buckets, ("+Inf", float(sums[-1]))], total)
        return family

    def _cache_config(self) -> Metric:
        """Always 1; what it says is in its labels."""
        kv = self._client.model.kv
        family = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info", "The KV cache.", labels=("model_name", *kv)
        )
        family.add_metric((self._model, *kv.values()), 1)
        return family

    def _by_tenant(self) -> Iterator[Metric]:
        counts: dict[str, Callable[[str], float]] = {
            "requests": lambda name: self._admission.uses[name].num_requests,
            "refused_requests": lambda name: self._admission.uses[name].num_refused,
            "prompt_tokens": lambda name: self._admission.uses[name].num_prompt_tokens,
            "cached_tokens": lambda name: self._admission.uses[name].num_cached_tokens,
            "cache_write_tokens": lambda name: self._admission.uses[name].num_cache_write_tokens,
            "generation_tokens": lambda name: self._admission.uses[name].num_output_tokens,
        }
        for what, count in counts.items():
            family = CounterMetricFamily(
                f"{self._prefix}:tenant_{what}", f"Per tenant: {what}.", labels=("tenant",)
            )
            for name in self._admission.uses:
                family.add_metric((name,), count(name))
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
