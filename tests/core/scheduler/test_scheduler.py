"""What the scheduler promises: order, budget, sharing, refusal, preemption,
and failures that stay with one request."""

from __future__ import annotations

from typing import Any

import pytest

from quire.common.numbers import ceil_div
from quire.core.content import Content
from quire.core.plan import RowSampling
from quire.core.request import FinishReason, Request, SequenceStatus
from quire.core.scheduler.audit import audit
from quire.errors import InvalidParameterError, PromptTooLongError
from quire.sim.faults import force_preemption
from quire.sim.scenario import STOP_TOKEN

Harness = Any


def _rows(harness: Any, plan: Any) -> list[tuple[str, int, int]]:
    names = {sequence.row: sequence.name for sequence in harness.scheduler.running}
    return [(names.get(work.row, "?"), work.start, work.num_tokens) for work in plan.work]


# -- chunks and budget
# -----------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_of_the_budget(harness: Harness) -> None:
    run = harness(max_num_batched_tokens=10, max_num_seqs=4)
    request = run.add("a", 25, max_tokens=3)
    plans = [run.step() for _ in range(3)]
    assert [
        (plan.work[0].start, plan.work[0].num_tokens, plan.work[0].num_samples) for plan in plans
    ] == [
        (0, 10, 0),
        (10, 10, 0),
        (20, 5, 1),
    ]
    run.run()
    run.check(request)
    assert request.metrics.num_prefill_chunks == 3


def test_decodes_go_first_and_prefills_take_what_is_left_of_the_budget(harness: Harness) -> None:
    run = harness(max_num_batched_tokens=8, max_num_seqs=4)
    run.add("a", 4, max_tokens=20)
    run.step()
    run.add("b", 30)
    plan = run.step()
    assert _rows(run, plan) == [("a", 4, 1), ("b", 0, 7)]
    assert run.step().num_tokens == 8


def test_without_chunked_prefill_a_prompt_is_computed_whole(harness: Harness) -> None:
    run = harness(max_num_batched_tokens=40, max_model_len=40, enable_chunked_prefill=False)
    requests = [run.add("a", 30), run.add("b", 30), run.add("c", 5)]
    first = run.step()
    assert _rows(run, first) == [("a", 0, 30)], "b does not fit, and nobody overtakes it"
    second = run.step()
    assert ("b", 0, 30) in _rows(run, second)
    run.run()
    for request in requests:
        run.check(request)


def test_a_prompt_of_one_token_gets_work_once_per_step_without_chunked_prefill(
    harness: Harness,
) -> None:
    run = harness(max_num_batched_tokens=40, max_model_len=40, enable_chunked_prefill=False)
    request = run.add("a", 1)
    assert len(run.step().work) == 1
    run.run()
    run.check(request)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 64])
def test_answers_do_not_depend_on_the_budget(harness: Harness, budget: int) -> None:
    run = harness(max_num_batched_tokens=budget, max_num_seqs=min(budget, 4))
    requests = [
        run.add(name, length, max_tokens=6)
        for name, length in (("a", 17), ("b", 1), ("c", 8), ("d", 9))
    ]
    run.run()
    for request in requests:
        run.check(request)


# -- order
# --------------------------------------------------------------------------------------------------


def test_first_come_first_served_whatever_the_priority(harness: Harness) -> None:
    run = harness(max_num_seqs=1)
    run.add("a", 4, priority=5)
    run.add("b", 4, priority=0)
    assert run.step().new_rows[0].name == "a"


def test_under_the_priority_policy_the_smaller_number_goes_first(harness: Harness) -> None:
    run = harness(max_num_seqs=1, policy="priority")
    run.add("a", 4, priority=5)
    run.add("b", 4, priority=0)
    assert run.step().new_rows[0].name == "b"


def test_an_urgent_request_displaces_a_running_one_of_a_lower_class(harness: Harness) -> None:
    run = harness(max_num_seqs=1, policy="priority")
    low = run.add("low", 6, max_tokens=8, priority=1)
    for _ in range(3):
        run.step()
    high = run.add("high", 6, priority=0)
    plan = run.step()
    assert _rows(run, plan) == [("high", 0, 6)]
    assert low.sequences[0].status is SequenceStatus.WAITING and low.metrics.num_preemptions == 1
    run.run()
    run.check(low)
    run.check(high)


def test_equal_priority_never_displaces(harness: Harness) -> None:
    run = harness(max_num_seqs=1, policy="priority")
    run.add("a", 6, max_tokens=8, priority=1)
    run.step()
    run.add("b", 6, priority=1)
    run.run()
    assert run.scheduler.stats.num_preemptions == 0


def test_rows_bound_how_many_run(harness: Harness) -> None:
    run = harness(max_num_seqs=3)
    for number in range(7):
        run.add(f"r{number}", 2)
    run.step()
    assert len(run.scheduler.running) == 3 and run.scheduler.num_waiting == 4
    assert run.scheduler.waiting.sequences()[0].waits_for == "all 3 rows are taken"
    run.run()


# -- the door
# --------------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_the_pool_is_refused_with_the_numbers(harness: Harness) -> None:
    run = harness(num_blocks=5, block_size=4, max_model_len=100)
    neighbour = run.add("ok", 10, max_tokens=11)  # 20 slots: the last token needs none
    with pytest.raises(
        PromptTooLongError,
        match=r"10 tokens and up to 12 new ones need 6 KV blocks of 4.* pool has 5",
    ):
        run.add("big", 10, max_tokens=12)
    run.run()
    run.check(neighbour)


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(harness: Harness) -> None:
    run = harness(max_model_len=16)
    with pytest.raises(PromptTooLongError, match="16 tokens, but the context holds 16"):
        run.add("a", 16)
    request = run.add("b", 15, max_tokens=100)
    assert request.max_tokens == 1
    run.run()


def test_empty_prompts_and_ids_in_use_are_refused(harness: Harness) -> None:
    run = harness()
    with pytest.raises(InvalidParameterError, match="prompt is empty") as caught:
        run.add("a", ())
    assert caught.value.param == "prompt"
    run.add("a", 3)
    with pytest.raises(InvalidParameterError, match="'a' is already in use"):
        run.add("a", 3)
    run.run()
    run.add("a", 3)  # free again
    run.run()


# -- sharing
# --------------------------------------------------------------------------------------------------


def test_a_second_request_with_the_same_prefix_computes_only_the_rest(harness: Harness) -> None:
    run = harness()
    prefix = list(range(20))
    run.add("a", [*prefix, 50, 51])
    run.run()
    request = run.add("b", [*prefix, 60, 61, 62])
    plan = run.step()
    assert plan.work[0].start == 20 and plan.work[0].num_tokens == 3
    assert request.metrics.num_prefix_hit_tokens == 20
    run.run()
    run.check(request)


def test_prompt_tokens_are_counted_as_written_once_in_whole_blocks(harness: Harness) -> None:
    run = harness()
    prompt = list(range(22))
    first = run.add("a", prompt)
    run.run()
    assert first.metrics.num_cache_write_tokens == 20
    same, longer = run.add("b", prompt), run.add("c", [*prompt, *range(50, 60)])
    run.run()
    assert same.metrics.num_cache_write_tokens == 0
    cached = longer.metrics.num_prefix_hit_tokens
    assert cached + longer.metrics.num_cache_write_tokens == 32, "of a block, what was not copied"


def test_prompts_of_equal_tokens_share_only_what_has_the_same_content(harness: Harness) -> None:
    run = harness()
    image, other = bytes(32), bytes(31) + b"x"
    text, padding = list(range(6)), [3] * 6

    def add(name: str, digest: bytes) -> Request:
        contents = (Content(6, 12, digest),)
        request: Request = run.add(name, [*text, *padding, *text], contents=contents)
        run.run()
        run.check(request)
        return request

    add("a", image)
    assert add("the same", image).metrics.num_prefix_hit_tokens == 17
    assert add("another", other).metrics.num_prefix_hit_tokens == 6, "up to the content"
    plain = run.add("plain", [*text, *padding, *text])
    contents = (Content(6, 12, image),)
    first = run.add("further", [*text, *padding, *text, 20, 21], contents=contents)
    run.run()
    assert plain.metrics.num_prefix_hit_tokens == 6 and first.metrics.num_prefix_hit_tokens >= 18


def test_hits_are_counted_to_the_token_and_the_last_token_is_always_computed(
    harness: Harness,
) -> None:
    run = harness()
    prompt = list(range(14))
    run.add("a", prompt)
    run.run()
    for end in range(1, 15):
        request = run.add(f"b{end}", prompt[:end])
        run.run()
        assert request.metrics.num_prefix_hit_tokens == end - 1
        run.check(request)


def test_a_request_waits_for_a_prefix_that_another_is_computing(harness: Harness) -> None:
    run = harness(max_num_batched_tokens=10)
    prefix = list(range(16))
    first = run.add("a", [*prefix, 90])
    second = run.add("b", [*prefix, 91])
    third = run.add("c", 4)
    plan = run.step()
    assert _rows(run, plan) == [("a", 0, 10)]
    plan = run.step()
    assert (
        second.sequences[0].waits_for
        == "waits for a shared prefix that another request is computing"
    )
    assert _rows(run, plan) == [("a", 10, 7), ("c", 0, 3)], "the others do not wait with it"
    run.run()
    assert second.metrics.num_prefix_hit_tokens == 16
    assert run.scheduler.stats.num_computed_tokens == 17 + 1 + 4 + 3 * 3
    for request in (first, second, third):
        run.check(request)


@pytest.mark.parametrize("ending", ["abort", "fail", "preempt"])
def test_whoever_waits_for_a_prefix_takes_over_when_its_owner_stops(
    harness: Harness, ending: str
) -> None:
    run = harness(max_num_batched_tokens=8)
    prefix = list(range(40))
    run.add("a", prefix)
    second = run.add("b", prefix)
    run.step()
    run.step()
    if ending == "abort":
        run.scheduler.abort("a")
    elif ending == "fail":
        run.scheduler.fail("a", "broken")
    else:
        force_preemption(run.scheduler, run.scheduler.running[0])
    audit(run.scheduler)
    run.run()
    run.check(second)


def test_who_must_not_read_the_cache_neither_hits_nor_waits(harness: Harness) -> None:
    run = harness()
    prompt = list(range(12))
    run.add("a", prompt)
    request = run.add("b", prompt, reads_cache=False)
    plan = run.step()
    assert _rows(run, plan) == [("a", 0, 12), ("b", 0, 12)]
    assert run.scheduler.manager.num_merges == 3, "the same blocks computed twice are kept once"
    run.run()
    assert request.metrics.num_prefix_hit_tokens == 0
    run.check(request)


def test_namespaces_do_not_share(harness: Harness) -> None:
    run = harness()
    prompt = list(range(12))
    run.add("a", prompt, namespace=("one",))
    run.run()
    request = run.add("b", prompt, namespace=("two",))
    run.run()
    assert request.metrics.num_prefix_hit_tokens == 0


def test_parallel_samples_share_the_prompts_blocks(harness: Harness) -> None:
    def peak(num_sequences: int, copies: int) -> int:
        run = harness(
            num_blocks=2000, block_size=16, max_num_seqs=64, max_num_batched_tokens=4096,
            max_model_len=400,
            enable_prefix_caching=False,
        )  # fmt: skip
        requests = [
            run.add(
                f"p{prompt}.{copy}",
                [prompt, *range(255)],
                max_tokens=32,
                num_sequences=num_sequences,
                sampling=RowSampling(seed=prompt),
            )
            for prompt in range(8)
            for copy in range(copies)
        ]
        run.run()
        if num_sequences > 1:
            run.check(requests[0])
        return int(run.scheduler.stats.peak_num_blocks)

    shared, separate = peak(8, 1), peak(1, 8)
    assert separate == 8 * 8 * ceil_div(256 + 31, 16)
    assert shared <= 0.45 * separate, f"{shared} blocks against {separate}"


def test_a_fork_copies_only_the_unfinished_block(harness: Harness) -> None:
    run = harness(num_blocks=64, block_size=4)
    request = run.add("a", 10, max_tokens=3, num_sequences=3)
    run.step()
    assert run.scheduler.manager.pool.num_used == 3, "three sequences on one prompt's blocks"
    plan = run.step()
    assert len(plan.copies) == 2, "the last owner writes in place"
    assert run.scheduler.manager.pool.num_used == 5
    run.run()
    run.check(request)


def test_forks_without_a_free_row_wait_and_find_the_prompt_in_the_cache(harness: Harness) -> None:
    run = harness(max_num_seqs=2)
    request = run.add("a", 9, max_tokens=4, num_sequences=5)
    run.step()
    assert len(run.scheduler.running) == 2 and run.scheduler.num_waiting == 3
    run.run()
    run.check(request)
    assert len(request.sequences) == 5


# -- preemption
# --------------------------------------------------------------------------------------------------


def test_growth_beyond_the_pool_preempts_the_youngest_and_loses_nothing(harness: Harness) -> None:
    run = harness(num_blocks=8, block_size=4)
    requests = [run.add(name, 6, max_tokens=20) for name in ("a", "b", "c")]
    run.run()
    assert run.scheduler.stats.num_preemptions > 0
    assert requests[0].metrics.num_preemptions == 0, (
        "the oldest is never preempted for a younger one"
    )
    for request in requests:
        run.check(request)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("position", range(1, 9))
@pytest.mark.parametrize("times", [1, 3])
def test_preemption_at_any_token_changes_nothing(
    harness: Harness, caching: bool, position: int, times: int
) -> None:
    sampling = RowSampling(temperature=1.0, seed=3, num_logprobs=2, num_prompt_logprobs=1)
    run = harness(enable_prefix_caching=caching, max_num_batched_tokens=16)
    request = run.add("a", 7, max_tokens=9, num_sequences=2, sampling=sampling)
    run.add("b", 11, max_tokens=12)
    while run.scheduler.has_work:
        for sequence in [
            s
            for s in run.scheduler.running
            if s.request is request and s.num_output_tokens == position
        ]:
            if request.metrics.num_preemptions < times * 2:
                force_preemption(run.scheduler, sequence)
        run.step()
    assert request.metrics.num_preemptions > 0
    run.check(request)


def test_nobody_is_preempted_twice_without_a_token_in_between(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness(num_blocks=6, block_size=2, max_num_batched_tokens=8)
    requests = [run.add(f"r{number}", 3, max_tokens=9) for number in range(5)]
    lengths: dict[Any, int] = {}
    preempt = run.scheduler.planner._preempt

    def watch(preemption: Any) -> None:
        victim = preemption.victim
        assert len(victim.token_ids) > lengths.get(victim, 0), f"{victim.name} had gained nothing"
        lengths[victim] = len(victim.token_ids)
        preempt(preemption)

    monkeypatch.setattr(run.scheduler.planner, "_preempt", watch)
    run.run()
    assert lengths, "the pool was too large for this test"
    for request in requests:
        run.check(request)


# -- endings
# --------------------------------------------------------------------------------------------------


def test_stop_tokens_count_only_after_min_tokens(harness: Harness) -> None:
    run = harness()
    stop = frozenset({STOP_TOKEN})
    requests = [
        run.add(f"{least}.{seed}", [seed, 2, 3], max_tokens=40, stop_token_ids=stop,
                sampling=RowSampling(temperature=1.0, seed=seed, min_tokens=least))
        for least in (0, 6) for seed in range(4)
    ]  # fmt: skip
    run.run()
    for request in requests:
        run.check(request)
        sequence = request.sequences[0]
        if sequence.finish_reason is FinishReason.STOP:
            assert (
                sequence.stop_reason == STOP_TOKEN
                and sequence.num_output_tokens > request.sampling.min_tokens
            )
    assert {request.sequences[0].finish_reason for request in requests} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_everything_at_once_wherever_the_request_is(
    harness: Harness, steps: int
) -> None:
    run = harness(max_num_batched_tokens=8, max_num_seqs=2)
    request = run.add("a", 20, max_tokens=8, num_sequences=3)
    other = run.add("b", 5)
    for _ in range(steps):
        run.step()
    assert run.scheduler.abort("a") is request and run.scheduler.abort("a") is None
    audit(run.scheduler)
    assert all(sequence.finish_reason is FinishReason.ABORT for sequence in request.sequences)
    run.run()
    run.check(other)


def test_an_abort_while_the_step_runs_is_honoured(harness: Harness) -> None:
    run = harness()
    request, other = run.add("a", 5), run.add("b", 5)
    plan = run.scheduler.schedule(0.0)
    result = run.executor.execute(plan)
    run.scheduler.abort("a")
    late = run.add("c", 6)  # takes a's row before the result is in
    progress = run.scheduler.update(plan, result, 0.0)
    assert {sequence.request for sequence, *_ in progress} == {other}
    audit(run.scheduler)
    run.run()
    assert request.sequences[0].output_token_ids == []
    run.check(other)
    run.check(late)


def test_a_failing_row_ends_its_request_alone_and_leaves_nothing_in_the_cache(
    harness: Harness,
) -> None:
    run = harness()
    prompt = [7] * 9
    bad = run.add("bad", prompt)
    good = [run.add("g1", 5), run.add("g2", 9, num_sequences=2)]
    run.scheduler.schedule  # noqa: B018
    plan = run.scheduler.schedule(0.0)
    result = run.executor.execute(plan)
    run.scheduler.update(plan, run.fail_row("bad")(plan, result), 0.0)
    audit(run.scheduler)
    assert bad.error == "non-finite" and bad.sequences[0].finish_reason is FinishReason.ERROR
    again = run.add("again", prompt)
    run.run()
    assert again.metrics.num_prefix_hit_tokens == 0, "what the failed row computed was reused"
    for request in (*good, again):
        run.check(request)


def test_one_failing_sample_ends_its_siblings_too(harness: Harness) -> None:
    run = harness()
    request = run.add("a", 6, max_tokens=9, num_sequences=3)
    run.step()
    run.step(run.fail_row("a#1"))
    assert request.is_finished and {s.finish_reason for s in request.sequences} == {
        FinishReason.ERROR
    }
    assert not run.scheduler.has_work


def test_progress_reports_each_token_once_and_one_end(harness: Harness) -> None:
    run = harness()
    request = run.add("a", 6, max_tokens=5, num_sequences=2)
    run.run()
    for sequence in request.sequences:
        mine = [token for who, token, _ in run.progress if who is sequence]
        assert mine == [*sequence.output_token_ids, None]


def test_the_times_of_a_request_are_in_order(harness: Harness) -> None:
    run = harness(max_num_batched_tokens=8)
    request = run.add("a", 20, max_tokens=4)
    run.run()
    metrics = request.metrics
    assert metrics.first_scheduled_s == 0.0 and metrics.first_token_s == 2.0
    assert metrics.last_token_s == metrics.finished_s == 5.0


# -- caches do not change answers
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
def test_cold_warm_partly_evicted_and_disabled_caches_give_the_same(
    harness: Harness, length: int
) -> None:
    sampling = RowSampling(temperature=1.0, seed=5, num_logprobs=3, num_prompt_logprobs=2)
    prompt = list(range(length))
    run = harness(num_blocks=10)
    cold = run.add("cold", prompt, sampling=sampling)
    run.run()
    warm = run.add("warm", prompt, sampling=sampling)
    run.run()
    run.add("noise", 26, max_tokens=6)  # evicts most of the pool
    run.run()
    evicted = run.add("evicted", prompt, sampling=sampling)
    run.run()
    aborted = run.add("aborted", [*prompt, 3], max_tokens=8)
    run.step()
    run.scheduler.abort(aborted.request_id)
    after_abort = run.add("after", prompt, sampling=sampling)
    run.run()
    off = harness(enable_prefix_caching=False)
    disabled = off.add("cold", prompt, sampling=sampling)
    off.run()
    for request in (cold, warm, evicted, after_abort):
        run.check(request)
        assert request.sequences[0].token_ids == disabled.sequences[0].token_ids
        assert request.prompt_logprobs == disabled.prompt_logprobs


def test_resetting_the_cache_makes_the_next_prompt_cold(harness: Harness) -> None:
    run = harness()
    run.add("a", range(12))
    run.run()
    assert run.scheduler.reset_prefix_cache() > 0
    request = run.add("b", range(12))
    run.run()
    assert request.metrics.num_prefix_hit_tokens == 0


# -- cost
# --------------------------------------------------------------------------------------------------


def _num_calls(run: Any) -> int:
    """Python calls made by one schedule and update."""
    import sys

    count = 0

    def tally(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        plan = run.scheduler.schedule(0.0)
    finally:
        sys.setprofile(None)
    result = run.executor.execute(plan)
    sys.setprofile(tally)
    try:
        run.scheduler.update(plan, result, 0.0)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
def test_a_step_costs_what_it_schedules_and_not_what_waits(harness: Harness) -> None:
    costs = []
    for num_waiting in (10, 10_000):
        run = harness(max_num_seqs=4)
        for number in range(4):
            run.add(f"running{number}", 6, max_tokens=50)
        for number in range(num_waiting):
            run.add(f"w{number}", [number, 1, 2], max_tokens=2)
        run.step()
        run.step()
        costs.append(_num_calls(run))
    assert costs[1] <= costs[0] + 5, f"{costs[0]} calls with 10 waiting, {costs[1]} with 10,000"


def test_a_request_that_did_not_fit_comes_in_once_its_prefix_is_there_to_share(
    harness: Harness,
) -> None:
    run = harness(num_blocks=10, block_size=4)
    first, second = (
        run.add("a", range(28), max_tokens=6),
        run.add("b", [*range(24), 9, 9], max_tokens=4),
    )
    run.step()
    assert "blocks" in (second.sequences[0].waits_for or "")
    run.step()
    assert second.sequences[0].status is SequenceStatus.RUNNING, (
        "the prefix of six blocks is shared now"
    )
    run.run()
    run.check(first)
    run.check(second)


def test_a_blocked_long_prompt_is_not_matched_again_in_every_step(harness: Harness) -> None:
    costs = []
    for length in (100, 3_000):
        run = harness(
            num_blocks=800,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=4096,
            max_model_len=4000,
        )
        run.add("cached", length, max_tokens=2)
        run.run()
        run.add("big", [5] * 2500, max_tokens=600)
        run.step()
        run.add(
            "blocked",
            [1000 + sum(map(ord, "cached")), *range(1, length), *([3] * (3100 - length))],
            max_tokens=4,
        )
        run.step()
        costs.append(max(_num_calls(run) for _ in range(9)))
    assert costs[1] < 2 * costs[0], (
        f"{costs[0]} calls behind 100 cached tokens, {costs[1]} behind 3,000"
    )


@pytest.mark.slow
def test_aborted_requests_do_not_pile_up_behind_a_long_queue(harness: Harness) -> None:
    run = harness(max_num_seqs=1)
    run.add("first", 4, max_tokens=100)
    for number in range(2_000):
        run.add(f"r{number}", 4)
        run.scheduler.abort(f"r{number}")
    assert len(run.scheduler.waiting._heap) < 200
    run.run()
