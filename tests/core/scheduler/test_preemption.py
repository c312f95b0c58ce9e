"""The choice of a victim."""

from __future__ import annotations

from typing import Any

from quire.core.scheduler.preemption import assess, choose_victim

Harness = Any


def _running(harness: Harness, *lengths: int, **changes: Any) -> Any:
    run = harness(policy="priority", **changes)
    for number, length in enumerate(lengths):
        run.add(
            f"r{number}",
            length,
            max_tokens=20,
            priority=changes.get("priorities", {}).get(number, 0),
        )
    run.step()
    run.step()
    return run


def _choose(run: Any) -> Any:
    return choose_victim(run.scheduler.running, None, run.scheduler.manager)


def test_the_cheapest_goes_and_the_youngest_among_equals(harness: Harness) -> None:
    assert _choose(_running(harness, 20, 6, 9)).victim.name == "r1"
    assert _choose(_running(harness, 6, 6, 6)).victim.name == "r2"


def test_a_lower_class_goes_before_a_cheaper_one(harness: Harness) -> None:
    run = harness(policy="priority")
    run.add("dear", 40, max_tokens=9, priority=1)
    run.step()
    run.add("cheap", 2, max_tokens=9, priority=0)
    run.step()
    run.step()
    assert _choose(run).victim.name == "dear"


def test_whoever_has_not_progressed_is_spared(harness: Harness) -> None:
    run = harness(max_num_batched_tokens=8)
    run.add("a", 30, max_tokens=4)
    run.step()
    assert _choose(run) is None


def test_shared_blocks_are_neither_freed_nor_computed_again(harness: Harness) -> None:
    run = harness()
    run.add("a", 16, max_tokens=9, num_sequences=2)
    run.step()
    run.step()
    manager, sequence = run.scheduler.manager, run.scheduler.running[0]
    preemption = assess(sequence, run.scheduler.running[1], manager)
    assert preemption.num_freed_blocks == 1 and preemption.num_recomputed_tokens == 4
    assert preemption.reason() == (
        "preempted a (1 blocks freed, at most 4 tokens to compute again): a#1 needs memory"
    )
    assert "nothing else could run" in assess(sequence, None, manager).reason()
