"""`get_metrics()`: an engine's counters as records of name and value,
under the names that dashboards of vLLM know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.core.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number, or several, under a name."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """A total since the engine was built."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """How it is now."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Several totals of one kind."""

    values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """How many of all observations were at most as large as each bound."""

    count: int
    sum: float
    buckets: Mapping[str, int]


def snapshot(scheduler: Scheduler, model: str) -> list[Metric]:
    """Return the engine's numbers now. Prompt tokens and cache hits are those of finished
    requests."""
    # needs the server's message library, which offline use does without
    from quire.engine.loop.counters import count

    labels = {"model_name": model, "engine": "0"}
    counts, stats = count(scheduler), scheduler.stats
    totals = {
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": counts.num_generated_tokens,
        "prefix_cache_queries": stats.num_prompt_tokens,
        "prefix_cache_hits": counts.num_prefix_hit_tokens,
        "num_preemptions": counts.num_preemptions,
        "kv_blocks_kept": counts.num_kept_kv_blocks,
        "kv_blocks_restored": counts.num_restored_kv_blocks,
        "kv_blocks_faulty": counts.num_faulty_kv_blocks,
        "request_success": sum(stats.num_finished.values()),
    }
    levels = {
        "num_requests_running": float(counts.num_running),
        "num_requests_waiting": float(counts.num_waiting),
        "kv_cache_usage_perc": counts.kv_usage,
    }
    return [
        *(Gauge(name=f"vllm:{name}", labels=labels, value=value) for name, value in levels.items()),
        *(
            Counter(name=f"vllm:{name}", labels=labels, value=value)
            for name, value in totals.items()
        ),
        _step_sizes(counts.num_steps_by_size, stats.num_computed_tokens, labels),
    ]


def _step_sizes(
    num_steps: tuple[int, ...], num_tokens: int, labels: Mapping[str, str]
) -> Histogram:
    buckets, total = {}, 0
    for place, number in enumerate(num_steps):
        total += number
        buckets["+Inf" if place == len(num_steps) - 1 else str(float(1 << place))] = total
    return Histogram(
        name="vllm:iteration_tokens_total",
        labels=labels,
        count=total,
        sum=float(num_tokens),
        buckets=buckets,
    )
