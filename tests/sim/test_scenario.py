"""Scenarios are values of their seed, and varied."""

from quire.sim.scenario import can_serve, make_scenario


def test_a_seed_always_means_the_same() -> None:
    assert make_scenario(9) == make_scenario(9)
    assert make_scenario(9) != make_scenario(10)


def test_seeds_cover_the_options() -> None:
    scenarios = [make_scenario(seed) for seed in range(200)]
    limits = [scenario.limits for scenario in scenarios]
    assert {limit.policy for limit in limits} == {"fcfs", "priority", "fair"}
    assert {limit.enable_chunked_prefill for limit in limits} == {True, False}
    assert {limit.enable_prefix_caching for limit in limits} == {True, False}
    assert {scenario.hash for scenario in scenarios} == {"keyed", "colliding"}
    assert {limit.num_blocks for limit in limits} == set(range(4, 17))
    specs = [spec for scenario in scenarios for _, spec in scenario.arrivals]
    assert any(spec.beam for spec in specs) and any(spec.num_sequences > 1 for spec in specs)
    assert any(not can_serve(each.limits, spec) for each in scenarios for _, spec in each.arrivals)


def test_liveness_scenarios_stop_their_faults_early() -> None:
    assert all(make_scenario(seed, is_liveness=True).faults.last_step <= 40 for seed in range(50))
    assert any(make_scenario(seed).faults.last_step > 40 for seed in range(50))
