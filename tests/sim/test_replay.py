"""Real traces through the real control plane: all served, little wasted, and exactly the cache hits
there are to have.

Whole traces are replayed with `quire simulate --trace`; here their beginnings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.limits import SchedulerLimits
from quire.sim.replay import ReplayReport, StepTimeModel, replay
from quire.sim.traces import Trace, TraceRequest, read_trace

pytestmark = pytest.mark.slow


def _replay(
    trace: Trace, *, block_size: int = 16, num_blocks: int = 0, step_s: float = 0.01
) -> ReplayReport:
    longest = max(
        request.num_prompt_tokens + request.num_output_tokens for request in trace.requests
    )
    num_blocks = num_blocks or trace.num_blocks_without_eviction(block_size)
    limits = SchedulerLimits(num_blocks, block_size, max_model_len=longest)
    return replay(trace, limits, StepTimeModel(step_s, 20e-6))


@pytest.mark.parametrize(
    ("name", "limit", "ideal"),
    [
        ("azure2023_conv.csv.gz", 400, 0.0),
        ("mooncake_conversation.jsonl.gz", 150, 0.04),
        ("sharegpt_multiturn_llama3.1_tok_blk16.jsonl.gz", 150, 0.04),
    ],
)
def test_the_beginning_of_a_real_trace(shared: Path, name: str, limit: int, ideal: float) -> None:
    report = _replay(read_trace(shared / "data" / "traces" / name, limit=limit))
    assert report.num_complete == report.num_requests == limit
    assert report.waste < 0.04, f"{100 * report.waste:.2f} % of the allocated slots are unused"
    assert report.misses == [] and report.num_hit_tokens == report.num_ideal_hit_tokens
    assert report.num_hit_tokens >= ideal * report.num_prompt_tokens
    assert report.num_preemptions == report.num_evictions == 0


def test_a_trace_in_too_small_a_pool_is_served_all_the_same(shared: Path) -> None:
    trace = read_trace(shared / "data" / "traces" / "azure2023_conv.csv.gz", limit=300)
    report = _replay(trace, num_blocks=1000, step_s=0.1)
    assert report.num_complete == 300
    assert report.num_preemptions > 0 and report.peak_num_blocks <= 1000 and report.waste < 0.04


def test_requests_that_arrive_together_share_what_one_of_them_computes() -> None:
    requests = [TraceRequest(0.0, 64 + extra, 5, (1, 2, 3, 4)) for extra in (1, 3, 5, 7)]
    report = _replay(Trace(tuple(requests), 16))
    assert report.num_complete == 4
    assert report.num_hit_tokens == 3 * 64 == report.num_ideal_hit_tokens


def test_the_clock_jumps_over_idle_times() -> None:
    report = _replay(Trace((TraceRequest(0.0, 4, 2), TraceRequest(1000.0, 4, 2)), 16), step_s=1.0)
    assert 1000 < report.virtual_s < 1010 and len(report.step_costs_s) == 4


def test_the_report_says_it_in_words() -> None:
    report = _replay(Trace((TraceRequest(0.0, 20, 3),), 16))
    text = "\n".join(report.lines())
    assert "1 of 1 complete, 20 prompt and 3 output tokens" in text and "ms a step" in text
    assert (
        report.cost_percentile_ms(50) > 0 and report.cost_percentile_ms(50, min_running=999) == 0.0
    )
