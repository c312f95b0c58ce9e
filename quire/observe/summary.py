"""The closing words of a run: speed, waiting, memory and cache,
from the requests' metrics and the scheduler's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from quire.core.scheduler.stats import SchedulerStats
from quire.engine.front.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Totals of one run. Rates are over the whole run's wall time."""

    num_requests: int
    num_failed: int
    wall_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_prefix_hit_tokens: int
    median_first_token_s: float | None
    """From a request's arrival to its first token."""
    peak_num_blocks: int
    num_blocks: int
    waste: float
    """Unused share of allocated KV slots, averaged over steps."""
    num_preemptions: int

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second, those from the cache included."""
        return self.num_prompt_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache held."""
        return (
            self.num_prefix_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
        )


def summarize(
    outputs: Sequence[RequestOutput], stats: SchedulerStats, *, num_blocks: int, wall_s: float
) -> RunSummary:
    """Summarize a run from finished outputs (cumulative ones) and the counters of the engine that
    made them."""
    waits = [
        output.metrics.first_token_s - output.metrics.arrival_s
        for output in outputs
        if output.metrics.first_token_s is not None
    ]
    return RunSummary(
        num_requests=len(outputs),
        num_failed=sum(1 for output in outputs if output.error is not None),
        wall_s=wall_s,
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(len(each.token_ids) for output in outputs for each in output.outputs),
        num_prefix_hit_tokens=sum(output.metrics.num_prefix_hit_tokens for output in outputs),
        median_first_token_s=median(waits) if waits else None,
        peak_num_blocks=stats.peak_num_blocks,
        num_blocks=num_blocks,
        waste=stats.waste,
        num_preemptions=stats.num_preemptions,
    )


def describe(summary: RunSummary) -> list[str]:
    """Three or four lines for people."""
    requests = f"{summary.num_requests} request{'' if summary.num_requests == 1 else 's'}"
    lines = [
        f"{requests}: {summary.num_prompt_tokens:,} prompt + {summary.num_output_tokens:,} "
        "output tokens "
        f"in {summary.wall_s:.2f} s",
        (
            f"speed: {summary.output_rate:,.1f} output tokens/s, {summary.prompt_rate:,.1f} "
            "prompt tokens/s"
        )
        + (
            ""
            if summary.median_first_token_s is None
            else f"; first token after {1000 * summary.median_first_token_s:,.0f} ms (median)"
        ),
        f"KV cache: {summary.peak_num_blocks:,} of {summary.num_blocks:,} blocks at the "
        f"peak, {summary.waste:.1%} wasted; "
        f"prefix hits {summary.num_prefix_hit_tokens:,} tokens ({summary.prefix_hit_rate:.0%}); "
        f"{summary.num_preemptions} preemptions",
    ]
    if summary.num_failed:
        lines.append(f"failed: {summary.num_failed} of {requests}")
    return lines
