"""The closing summary: totals, rates and medians from outputs and counters."""

from __future__ import annotations

from quire.core.request import RequestMetrics
from quire.core.scheduler.stats import SchedulerStats
from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.observe.summary import describe, summarize


def output(
    num_prompt: int, num_output: int, wait_s: float | None, hits: int = 0, error: str | None = None
) -> RequestOutput:
    metrics = RequestMetrics(
        arrival_s=10.0,
        first_token_s=None if wait_s is None else 10.0 + wait_s,
        num_prefix_hit_tokens=hits,
    )
    completion = CompletionOutput(0, "", list(range(num_output)), finish_reason="stop")
    return RequestOutput(
        "0", None, list(range(num_prompt)), [completion], True, metrics=metrics, error=error
    )


def test_summary_adds_up() -> None:
    stats = SchedulerStats(
        peak_num_blocks=7, num_preemptions=2, allocated_slot_steps=1000, unused_slot_steps=25
    )
    outputs = [
        output(100, 10, 0.1, hits=50),
        output(60, 20, 0.3),
        output(40, 30, 0.2, hits=30),
        output(1, 0, None, error="x"),
    ]
    summary = summarize(outputs, stats, num_blocks=64, wall_s=2.0)
    assert (
        summary.num_prompt_tokens,
        summary.num_output_tokens,
        summary.num_prefix_hit_tokens,
    ) == (201, 60, 80)
    assert summary.output_rate == 30.0 and summary.prompt_rate == 100.5
    assert abs((summary.median_first_token_s or 0) - 0.2) < 1e-9
    text = "\n".join(describe(summary))
    for part in (
        "4 requests",
        "7 of 64 blocks",
        "2.5% wasted",
        "80 tokens (40%)",
        "2 preemptions",
        "failed: 1 of 4",
    ):
        assert part in text


def test_nothing_to_summarize() -> None:
    summary = summarize([], SchedulerStats(), num_blocks=1, wall_s=0.0)
    assert (
        summary.output_rate == summary.prefix_hit_rate == 0.0
        and summary.median_first_token_s is None
    )
    assert "first token" not in "\n".join(describe(summary))
