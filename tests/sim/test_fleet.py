"""The fleet: the schedulers and the policy are the real ones, so replicas can be tried before they
are bought, and policies before they are deployed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.config.limits import SchedulerLimits
from quire.config.route import ROUTING_POLICIES
from quire.sim.fleet import FleetReport, FleetSettings, percentile, simple_costs, simulate_fleet
from quire.sim.replay import StepTimeModel, replay
from quire.sim.traces import Trace, TraceRequest, read_trace

STEP_S, TOKEN_S = 0.01, 50e-6


def _conversations(num_users: int, num_turns: int, *, has_common: bool) -> Trace:
    """Users that talk in turns, each turn on top of all before it."""
    chance, requests = random.Random(7), []
    for user in range(num_users):
        arrival_s = chance.uniform(0, 4)
        for turn in range(num_turns):
            own = tuple(1000 * (user + 1) + place for place in range(4 * turn + 4))
            hashes = (*range(1, 5), *own) if has_common else own
            requests.append(TraceRequest(arrival_s, 16 * len(hashes), 8, hashes))
            arrival_s += 2.0
    return Trace(tuple(sorted(requests, key=lambda each: each.arrival_s)), 16)


def _run(
    trace: Trace, num_replicas: int, policy: str, num_blocks: int, speed: float = 1.0
) -> FleetReport:
    longest = max(each.num_prompt_tokens + each.num_output_tokens for each in trace.requests)
    limits = SchedulerLimits(num_blocks, max_model_len=longest)
    costs = simple_costs(STEP_S, TOKEN_S)
    return simulate_fleet(trace, FleetSettings(num_replicas, limits, costs, policy, speed=speed))


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_everything_is_served_and_two_runs_are_the_same(policy: str) -> None:
    trace = _conversations(12, 3, has_common=True)
    one, two = (_run(trace, 3, policy, 400) for _ in range(2))
    assert one.num_complete == len(trace.requests) == sum(one.requests_of)
    one.wall_s = two.wall_s = 0.0
    assert one == two
    assert "36 of 36 complete" in one.lines()[0]


def test_a_fleet_of_one_is_the_replay() -> None:
    """The same scheduler and the same time of a step give the same steps."""
    trace = _conversations(8, 3, has_common=False)
    longest = max(each.num_prompt_tokens + each.num_output_tokens for each in trace.requests)
    limits = SchedulerLimits(300, max_model_len=longest)
    alone = replay(trace, limits, StepTimeModel(STEP_S, TOKEN_S))
    fleet = _run(trace, 1, "round-robin", 300)
    assert (fleet.num_hit_tokens, fleet.num_steps) == (
        alone.num_hit_tokens,
        len(alone.step_costs_s),
    )
    assert fleet.virtual_s == pytest.approx(alone.virtual_s, rel=1e-6)


@pytest.mark.slow
def test_affinity_keeps_what_one_replica_with_all_the_memory_would_have() -> None:
    trace = _conversations(40, 4, has_common=True)
    whole = _run(trace, 1, "round-robin", 4 * 500)
    for policy in ("prefix-aware", "kv-aware"):
        report = _run(trace, 4, policy, 500)
        assert report.hit_rate > 0.95 * whole.hit_rate
        assert report.imbalance < 1.3 and max(report.requests_of) < 1.3 * 40
    assert _run(trace, 4, "round-robin", 500).hit_rate < 0.9 * whole.hit_rate


@pytest.mark.slow
def test_a_production_trace_over_four_replicas(shared: Path) -> None:
    path = shared / "data" / "traces" / "mooncake_conversation.jsonl.gz"
    trace = read_trace(path, limit=600)
    whole = _run(trace, 1, "round-robin", 4 * 200_000, 1.6)
    blind = _run(trace, 4, "round-robin", 200_000, 1.6)
    report = _run(trace, 4, "kv-aware", 200_000, 1.6)
    assert report.num_complete == 600
    assert report.hit_rate >= 0.95 * whole.hit_rate
    assert 2 * percentile(report.first_token_s, 95) <= percentile(blind.first_token_s, 95)
    assert report.imbalance < 1.3


@pytest.mark.slow
def test_a_multi_turn_trace_over_four_replicas(shared: Path) -> None:
    path = shared / "data" / "traces" / "sharegpt_multiturn_llama3.1_tok_blk16.jsonl.gz"
    trace = read_trace(path)
    whole, report = _run(trace, 1, "round-robin", 24_000), _run(trace, 4, "kv-aware", 6000)
    assert report.num_complete == len(trace.requests)
    assert report.hit_rate >= 0.95 * whole.hit_rate and report.imbalance < 1.3


def test_steps_that_are_bounded_by_time_keep_streams_going() -> None:
    """A pace learns from the virtual time of steps, as an engine's does from the real one."""
    requests = [TraceRequest(0.0, 16, 20)]
    requests += [TraceRequest(0.05 + 0.001 * number, 2000, 1) for number in range(8)]
    trace, costs = Trace(tuple(requests), 16), simple_costs(STEP_S, 1e-3)
    limits = SchedulerLimits(2000, max_model_len=4096)
    plain = simulate_fleet(trace, FleetSettings(1, limits, costs))
    paced = simulate_fleet(trace, FleetSettings(1, limits, costs, target_step_s=0.1))
    assert plain.num_complete == paced.num_complete == len(requests)
    assert paced.num_steps > plain.num_steps
    slow = FleetSettings(1, limits, costs, target_step_s=0.1, curve=((1, 3.0),))
    learned = simulate_fleet(trace, slow)
    assert learned.num_steps > paced.num_steps, "three times as slow, and chunks as long"


def test_a_request_waits_for_the_step_that_is_planned_already() -> None:
    requests = (TraceRequest(0.0, 16, 100), TraceRequest(0.105, 16, 1))
    trace, costs = Trace(requests, 16), simple_costs(0.01, 1e-9)
    waits = []
    for is_overlapped in (False, True):
        settings = FleetSettings(
            1, SchedulerLimits(100, max_model_len=256), costs, is_overlapped=is_overlapped
        )
        waits.append(simulate_fleet(trace, settings).first_token_s[0])
    assert waits == pytest.approx([0.015, 0.025], abs=1e-4)
