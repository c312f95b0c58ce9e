"""Tokens are shared among tenants in the proportion of their weights,
whatever each of them sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire.core.request import Request
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.fairness import MAX_ABSENT_TENANTS, FairQueue
from quire.core.strategies import SamplingStrategy

Harness = Callable[..., Any]


def _saturate(run: Any, tenants: dict[str, tuple[float, int, int]], num_steps: int) -> Counter[str]:
    """Keep ten requests of each tenant waiting (weight, prompt length, output length);
    tokens computed per tenant."""
    computed: Counter[str] = Counter()
    run.audit_every = 20  # hundreds of steps, with thousands of blocks to look at
    number = 0
    for step in range(num_steps):
        for tenant, (weight, prompt_len, output_len) in tenants.items():
            num_waiting = sum(s.request.tenant == tenant for s in run.scheduler.waiting.sequences())
            for _ in range(10 - num_waiting):
                number += 1
                run.add(f"{tenant}{number}", prompt_len, output_len, tenant=tenant, weight=weight)
        by_row = {s.row: s.request.tenant for s in run.scheduler.running}
        plan = run.step()
        by_row.update({new.row: new.name[0] for new in plan.new_rows})
        if step >= num_steps // 10:
            computed.update({by_row[work.row]: 0 for work in plan.work})
            for work in plan.work:
                computed[by_row[work.row]] += work.num_tokens
    return computed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param((20, 6), (20, 6), id="alike"),
        pytest.param((60, 2), (5, 20), id="long prompts against long answers"),
    ],
)
def test_shares_are_as_the_weights(
    harness: Harness, a: tuple[int, int], b: tuple[int, int]
) -> None:
    run = harness(policy="fair", num_blocks=256, max_num_seqs=16, max_num_batched_tokens=32)
    computed = _saturate(run, {"a": (3.0, *a), "b": (1.0, *b)}, 500)
    assert computed["a"] / computed["b"] == pytest.approx(3.0, rel=0.05)


@pytest.mark.slow
def test_first_come_first_served_would_not_share(harness: Harness) -> None:
    run = harness(policy="fcfs", num_blocks=256, max_num_seqs=16, max_num_batched_tokens=32)
    computed = _saturate(run, {"a": (3.0, 20, 6), "b": (1.0, 20, 6)}, 200)
    assert computed["a"] / computed["b"] < 1.5


def test_a_short_request_among_many_long_ones_is_served_within_two_steps(harness: Harness) -> None:
    run = harness(
        policy="fair", num_blocks=512, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=256
    )
    for number in range(200):
        run.add(f"long{number}", 100, 100, tenant="crowd")
    for _ in range(60):
        run.step()
    assert len(run.scheduler.running) == 8, "every row is taken"
    short = run.add("short", 8, 1, tenant="guest")
    run.step()
    run.step()
    assert short.is_finished and short.error is None


def test_who_was_away_saved_nothing_up(harness: Harness) -> None:
    run = harness(policy="fair")
    for number in range(4):
        run.add(f"a{number}", 30, 30, tenant="a")
    for _ in range(20):
        run.step()
    run.add("b", 10, 1, tenant="b")
    accounts = run.scheduler.waiting.accounts
    assert accounts["b"].served == accounts["a"].served > 0


def test_a_more_urgent_class_goes_first_whatever_was_served(harness: Harness) -> None:
    run = harness(policy="fair", max_num_seqs=1)
    run.add("served", 30, 4, tenant="a")
    for _ in range(5):
        run.step()
    run.add("poor", 10, 1, tenant="b", priority=1)
    run.add("urgent", 10, 1, tenant="a", priority=0)
    assert [s.request.request_id for s in run.scheduler.waiting.sequences()] == ["urgent", "poor"]


def test_absent_tenants_are_forgotten_in_the_end() -> None:
    queue = FairQueue()
    for number in range(MAX_ABSENT_TENANTS + 50):
        request = Request(
            RequestSpec(prompt_token_ids=(1,), tenant=str(number)), SamplingStrategy()
        )
        queue.arrived(request)
        queue.accounts[request.tenant].served = number
        queue.departed(request)
    assert len(queue.accounts) == MAX_ABSENT_TENANTS and "0" not in queue.accounts
