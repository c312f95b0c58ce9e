"""`get_metrics()`: an engine's counters as records of name and value,
under the names that dashboards of vLLM know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quire.core.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.engine.loop.counters import EngineCounters


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


class FinishedTotals(NamedTuple):
    """What is counted of requests as they end."""

    num_requests: int
    num_prompt_tokens: int


def snapshot(scheduler: Scheduler, model: str) -> list[Metric]:
    """Return the engine's numbers now. Prompt tokens and cache hits are those of finished
    requests."""
    # needs the server's message library, which offline use does without
    from quire.engine.loop.counters import count

    stats = scheduler.stats
    finished = FinishedTotals(sum(stats.num_finished.values()), stats.num_prompt_tokens)
    return as_metrics(count(scheduler), finished, model)


def as_metrics(
    counts: EngineCounters, finished: FinishedTotals, model: str, engine: int = 0
) -> list[Metric]:
    """Return the same of counters, of the engine with a number."""
    labels = {"model_name": model, "engine": str(engine)}
    totals = {
        "prompt_tokens": finished.num_prompt_tokens,
        "generation_tokens": counts.num_generated_tokens,
        "prefix_cache_queries": finished.num_prompt_tokens,
        "prefix_cache_hits": counts.num_prefix_hit_tokens,
        "num_preemptions": counts.num_preemptions,
        "kv_blocks_kept": counts.num_kept_kv_blocks,
        "kv_blocks_restored": counts.num_restored_kv_blocks,
        "kv_blocks_faulty": counts.num_faulty_kv_blocks,
        "request_success": finished.num_requests,
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
        _step_sizes(counts.num_steps_by_size, counts.num_computed_tokens, labels),
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
