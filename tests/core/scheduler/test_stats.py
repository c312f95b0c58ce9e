"""What is counted."""

from __future__ import annotations

from typing import Any

from quire.core.scheduler.stats import SchedulerStats


def test_waste_is_the_unused_share_of_allocated_slots(harness: Any) -> None:
    run = harness(block_size=4)
    run.add("a", 5, max_tokens=2)
    run.run()
    stats = run.scheduler.stats
    assert stats.allocated_slot_steps == 8 + 8 and stats.unused_slot_steps == 3 + 2
    assert stats.waste == 5 / 16 and SchedulerStats().waste == 0.0


def test_totals(harness: Any) -> None:
    run = harness()
    run.add("a", 6, max_tokens=3)
    run.run()
    run.add("b", [1000 + ord("a"), *range(1, 6)], max_tokens=3)
    run.run()
    run.add("c", 6)
    run.scheduler.abort("c")
    stats = run.scheduler.stats
    assert stats.num_steps == 6 and stats.num_generated_tokens == 6
    assert stats.num_finished == {"length": 2, "abort": 1}
    assert stats.num_prompt_tokens == 18 and stats.num_prefix_hit_tokens == 5
    assert stats.num_computed_tokens == 6 + 2 + 1 + 2
    assert stats.peak_num_running == 1 and stats.peak_num_blocks == 2
