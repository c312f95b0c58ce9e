"""Rows, blocks and turns; and prompt log-probabilities that come out of the cache."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.plan import RowSampling
from quire.core.scheduler.audit import audit
from quire.core.scheduler.resources import RowSlots
from quire.sim.faults import force_preemption

Harness = Any


def _scored(num_alternatives: int) -> RowSampling:
    return RowSampling(temperature=0.0, num_prompt_logprobs=num_alternatives)


def test_the_lowest_row_is_handed_out_first(harness: Harness) -> None:
    rows, run = RowSlots(2), harness()
    first, second, third = (run.add(name, 2).sequences[0] for name in "abc")
    rows.reserve(first)
    rows.reserve(second)
    assert (first.row, second.row) == (0, 1) and rows.refusal(third) == "all 2 rows are taken"
    rows.release(first)
    assert rows.refusal(third) is None and first.row == -1
    rows.reserve(third)
    assert third.row == 0


def test_everything_known_is_promised_at_admission(harness: Harness) -> None:
    run = harness(num_blocks=10, block_size=4, max_num_batched_tokens=8)
    run.add("a", 30, max_tokens=4)
    run.step()
    assert run.scheduler.manager.pool.num_used == 2 and run.scheduler.blocks.num_reserved == 6
    assert run.scheduler.blocks.num_available == 2
    waiting = run.add("b", 9)
    for _ in range(3):
        run.step()
    assert waiting.sequences[0].waits_for == "needs 3 blocks, 2 are available"
    run.run()


def test_the_watermark_is_left_free_while_others_run(harness: Harness) -> None:
    run = harness(num_blocks=20, block_size=4, watermark=0.2)
    run.add("a", 32, max_tokens=4)  # 8 blocks
    run.add("b", 33, max_tokens=4)  # 9: three would be left, the watermark is four
    run.step()
    assert [sequence.name for sequence in run.scheduler.running] == ["a"]
    run.run()
    alone = run.add("c", 79, max_tokens=2)  # 20: allowed where nobody else runs
    run.run()
    run.check(alone)


def test_prompt_scores_come_with_the_blocks(harness: Harness) -> None:
    run = harness()
    prompt = list(range(14))
    requests = [run.add("cold", prompt, sampling=_scored(2))]
    run.run()
    for end in range(1, 15):
        requests.append(run.add(f"warm{end}", prompt[:end], sampling=_scored(2)))
        run.run()
    for request in requests:
        run.check(request)
    assert requests[-1].metrics.num_prefix_hit_tokens == 11, (
        "three blocks, less the token that scores the next one"
    )


def test_scores_of_another_kind_are_not_reused(harness: Harness) -> None:
    run = harness()
    run.add("a", range(12), sampling=_scored(2))
    run.add("plain", [*range(8), 90, 91, 92, 93])
    run.run()
    for number in (0, 1, 2):
        request = run.add(f"b{number}", range(12), sampling=_scored(number))
        run.run()
        run.check(request)


def test_a_prompt_that_is_scored_computes_even_a_cached_prefix_without_scores(
    harness: Harness,
) -> None:
    run = harness()
    run.add("plain", range(12))
    run.run()
    request = run.add("scored", range(12), sampling=_scored(1))
    run.run()
    assert request.metrics.num_prefix_hit_tokens == 0
    run.check(request)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_scores_survive_preemption_beside_a_prompt_that_parts_ways(
    harness: Harness, block_size: int
) -> None:
    """The other prompt's blocks carry scores of tokens that this one does not have."""
    for steps in range(1, 8):
        run = harness(block_size=block_size, max_num_batched_tokens=3, max_num_seqs=3)
        other = run.add("other", [*range(7), 15, 14, 13, 12, 11], sampling=_scored(2))
        run.run()
        request = run.add("mine", [*range(7), 9, 10, 11, 12, 13], sampling=_scored(2))
        for _ in range(steps):
            run.step()
        for sequence in run.scheduler.running.copy():
            force_preemption(run.scheduler, sequence)
        if steps % 2:
            run.scheduler.reset_prefix_cache()
        audit(run.scheduler)
        run.run()
        run.check(other)
        run.check(request)


def test_an_answer_that_equals_a_scored_prompt_is_not_scored(harness: Harness) -> None:
    run = harness(block_size=2)
    request = run.add("a", [1], max_tokens=6, sampling=_scored(1))
    run.run()
    run.add("b", request.sequences[0].token_ids, max_tokens=1, sampling=_scored(1))
    run.run()
    again = run.add("again", [1], max_tokens=6, sampling=_scored(1))
    while run.scheduler.has_work:
        for sequence in run.scheduler.running.copy():
            force_preemption(run.scheduler, sequence)
        run.step()
        if again.metrics.num_preemptions > 20:
            run.run()
    run.check(again)


def test_scores_that_are_gone_from_the_first_block_leave_no_hole(harness: Harness) -> None:
    """The second block still has them, and the request itself those of the first,
    since it was preempted in between."""
    run = harness(block_size=4, max_num_batched_tokens=6, max_num_seqs=2)
    prompt = list(range(12))
    run.add("kind2", prompt, sampling=_scored(2))
    run.run()
    mine = run.add("mine", [*prompt[:11], 15], sampling=_scored(2))
    for node in run.scheduler.manager.index.nodes():
        if node.tokens == (0, 1, 2, 3):
            node.records, node.scoring = None, None
    run.step()
    force_preemption(run.scheduler, mine.sequences[0])
    run.run()
    run.check(mine)
