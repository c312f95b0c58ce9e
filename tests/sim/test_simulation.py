"""Hundreds of seeds in each run of the suite, more in `make test-long` and `make sim`,
and proofs that the simulator would see what it claims to see."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.kvcache.manager import BlockTable, PrefixMatch
from quire.core.scheduler.scheduler import Scheduler
from quire.core.scheduler.tiers import TierStats
from quire.sim.scenario import Faults, Scenario, make_scenario
from quire.sim.simulation import Simulation, SimulationError
from quire.sim.tiers import SimulatedTiers
from quire.tiers import disk

_NUM_SEEDS = int(os.environ.get("QUIRE_SIM_SEEDS", "240"))
_NUM_PARTS = 16
_PAST_SEEDS = (2, 3, 15, 42, 683)
"""Each of these once found a bug."""


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


_PARTS = [part if part % 8 == 0 else _slow(part) for part in range(_NUM_PARTS)]
"""The fast suite has an eighth of the seeds, of both kinds."""


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.timeout(600)
def test_whatever_goes_wrong_every_answer_is_the_oracles(part: int) -> None:
    is_liveness = part >= _NUM_PARTS // 2
    for seed in range(part, _NUM_SEEDS, _NUM_PARTS):
        Simulation(make_scenario(seed, is_liveness=is_liveness)).run()


@pytest.mark.slow
@pytest.mark.parametrize("is_liveness", [False, True])
@pytest.mark.timeout(600)
def test_answers_are_the_oracles_where_steps_are_planned_ahead(is_liveness: bool) -> None:
    num_steps = num_ahead = 0
    for seed in range(is_liveness, _NUM_SEEDS // 8, 2):
        outcome = Simulation(make_scenario(seed, is_liveness=is_liveness), is_overlapped=True).run()
        num_steps, num_ahead = num_steps + outcome.num_steps, num_ahead + outcome.num_ahead
    assert num_ahead > num_steps // 2, "too few steps are planned ahead to say anything"


@pytest.mark.slow_except("0.6-True")
@pytest.mark.parametrize("has_draft_model", [False, True])
@pytest.mark.parametrize("chance", [_slow(0.0), 0.6, _slow(0.95)])
@pytest.mark.timeout(600)
def test_answers_are_the_oracles_where_tokens_are_guessed(
    chance: float, *, has_draft_model: bool
) -> None:
    num_guessed = num_right = 0
    num_seeds = _NUM_SEEDS // (32 if has_draft_model else 16)
    for seed in range(num_seeds):
        scenario = make_scenario(seed, is_liveness=seed % 3 == 0)
        simulation = Simulation(
            scenario, is_overlapped=seed % 2 == 0, draft_chance=chance,
            has_draft_model=has_draft_model,
        )  # fmt: skip
        simulation.run()
        num_guessed += simulation.scheduler.stats.num_run_tokens
        num_right += sum(simulation.scheduler.stats.num_right_by_place)
    assert num_guessed > (4 if has_draft_model else 8) * num_seeds
    assert num_right > 0.8 * chance**4 * num_guessed


@pytest.mark.parametrize("is_overlapped", [_slow(False), True])
@pytest.mark.timeout(600)
def test_answers_are_the_oracles_where_groups_of_layers_have_windows(is_overlapped: bool) -> None:
    """One pool serves groups that keep everything and groups that give blocks back."""
    num_given_back = 0
    for seed in range(is_overlapped, _NUM_SEEDS // 8, 2):
        scenario = make_scenario(seed, is_liveness=seed % 4 > 1, has_windows=True)
        chance = 0.6 if seed % 3 == 0 else None
        simulation = Simulation(scenario, is_overlapped=is_overlapped, draft_chance=chance)
        manager = simulation.scheduler.manager
        give_back = manager.give_back

        def counted(*args: Any, give_back: Callable[..., list[int]] = give_back) -> list[int]:
            nonlocal num_given_back
            entries = give_back(*args)
            num_given_back += len(entries)
            return entries

        manager.give_back = counted  # type: ignore[method-assign,assignment]
        simulation.run()
    assert num_given_back > _NUM_SEEDS // 8


def _run_on_tiers(seed: int, folder: Path, *, has_faults: bool) -> list[TierStats]:
    """One scenario twice, on one folder: the second run begins with what the first one stored."""
    scenario = make_scenario(seed, is_liveness=seed % 2 == 0, has_windows=seed % 3 == 0)
    found = []
    for run in range(2):
        tiers = SimulatedTiers(seed + run * 7919, folder / str(seed), has_faults=has_faults)
        scenario = replace(scenario, hash="keyed")  # a digest identifies what is stored
        Simulation(scenario, is_overlapped=seed % 4 == 1, tiers=tiers).run()
        tiers.close()
        found.append(tiers.stats)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_are_the_oracles_where_blocks_are_stored_and_restored(tmp_path: Path) -> None:
    """Files are damaged, disks are full, and news is late."""
    found = [
        stats
        for seed in range(_NUM_SEEDS // 12)  # fewer have too few faults
        for stats in _run_on_tiers(seed, tmp_path, has_faults=seed % 5 != 0)
    ]
    assert sum(each.num_restored_blocks for each in found) > _NUM_SEEDS // 40
    assert sum(each.num_faulty_blocks for each in found) > 2
    assert sum(each.is_off for each in found) > 2


@pytest.mark.slow
def test_stored_blocks_that_are_believed_unread_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check of a record, damage shows as a wrong answer."""
    monkeypatch.setattr(
        disk, "decode", lambda record, key: record[-len(record) // 2 :] if record else None
    )
    with pytest.raises(SimulationError):
        for seed in range(100):
            _run_on_tiers(seed, tmp_path, has_faults=False)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("is_audited", [False, True])
def test_a_block_that_is_given_back_too_early_is_noticed(is_audited: bool) -> None:
    def hasty(scheduler: Scheduler) -> None:
        manager, give_back = scheduler.manager, scheduler.manager.give_back

        def early(table: BlockTable, num_computed: int) -> list[int]:
            num_slots = manager.num_places(table) * manager.block_size
            return give_back(table, min(num_computed + manager.block_size, num_slots))

        manager.give_back = early  # type: ignore[method-assign]

    with pytest.raises(SimulationError):
        for seed in range(60):
            scenario = make_scenario(seed, has_windows=True)
            Simulation(scenario, is_audited=is_audited, sabotage=hasty).run()


@pytest.mark.parametrize("seed", _PAST_SEEDS)
@pytest.mark.parametrize("is_liveness", [False, True])
def test_seeds_that_once_failed(seed: int, is_liveness: bool) -> None:
    Simulation(make_scenario(seed, is_liveness=is_liveness)).run()


@pytest.mark.slow
def test_the_scenarios_do_what_they_are_for() -> None:
    """Otherwise hundreds of seeds might pass because nothing happens in them."""
    finished: dict[str, int] = {}
    num_preemptions = num_copies = num_merges = num_evictions = num_refused = num_strikes = 0
    for seed in range(60):
        simulation = Simulation(make_scenario(seed))
        outcome = simulation.run()
        for reason, number in outcome.num_finished.items():
            finished[reason] = finished.get(reason, 0) + number
        num_refused += outcome.num_refused
        num_strikes += outcome.num_strikes
        manager = simulation.scheduler.manager
        num_preemptions += simulation.scheduler.stats.num_preemptions
        num_copies, num_merges = num_copies + manager.num_copies, num_merges + manager.num_merges
        num_evictions += manager.num_evictions
    assert set(finished) == {"stop", "length", "abort", "error"} and min(finished.values()) >= 10
    assert min(num_preemptions, num_copies, num_evictions, num_strikes) > 100
    assert num_merges > 5 and num_refused > 5


@pytest.mark.slow_except("11")
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_a_seed_gives_the_same_states_in_every_run(seed: int) -> None:
    first, second = (Simulation(make_scenario(seed)).run() for _ in range(2))
    assert first.state_hashes == second.state_hashes and len(first.state_hashes) > 5
    assert Simulation(make_scenario(seed + 1)).run().state_hashes != first.state_hashes


def test_a_failure_names_its_seed_and_step() -> None:
    simulation = Simulation(make_scenario(1))
    simulation.executor.execute = lambda plan: 1 / 0  # type: ignore[assignment,return-value,method-assign]
    with pytest.raises(SimulationError, match=r"seed=1 step=0: ZeroDivisionError"):
        simulation.run()


# -- negative controls: a broken engine must be caught
# ----------------------------------------------------------------


def _no_copy_on_write(scheduler: Scheduler) -> None:
    scheduler.manager._needs_copy = lambda table, start: False  # type: ignore[method-assign]
    scheduler.manager.fill_slot = lambda table, position: False  # type: ignore[method-assign]


def _copies_forgotten(scheduler: Scheduler) -> None:
    scheduler.blocks.take_copies = lambda: []  # type: ignore[method-assign]


def _released_too_early(scheduler: Scheduler) -> None:
    pool, share = scheduler.manager.pool, scheduler.manager.pool.share

    def share_once(block: int) -> None:
        if pool.ref_counts[block] == 0:
            share(block)

    pool.share = share_once  # type: ignore[method-assign]


def _wrong_block_in_the_plan(scheduler: Scheduler) -> None:
    extend = scheduler.manager.extend

    def swapped(*args: Any) -> Any:
        change = extend(*args)
        return (
            change._replace(appended=change.appended[::-1]) if len(change.appended) > 1 else change
        )

    scheduler.manager.extend = swapped  # type: ignore[method-assign,assignment]
    add = scheduler.planner.builder.add

    def add_hiding_the_table(sequence: Any, count: int, change: Any) -> None:
        if not sequence.is_resident and len(sequence.table.blocks) > 1:
            blocks = sequence.table.blocks
            blocks[0], blocks[1] = blocks[1], blocks[0]
            add(sequence, count, change)
            blocks[0], blocks[1] = blocks[1], blocks[0]
        else:
            add(sequence, count, change)

    scheduler.planner.builder.add = add_hiding_the_table  # type: ignore[method-assign]


def _published_before_computed(scheduler: Scheduler) -> None:
    extend, publish = scheduler.manager.extend, scheduler.manager.publish
    known: dict[int, Any] = {}
    blocks_publish = scheduler.blocks.publish

    def remember(sequence: Any) -> Any:
        known[id(sequence.table)] = sequence
        return blocks_publish(sequence)

    def eager(table: Any, keys: Any, token_ids: Any, num_computed: int) -> Any:
        return publish(
            table,
            keys,
            token_ids,
            min(len(table.blocks) * scheduler.limits.block_size, len(token_ids)),
        )

    scheduler.manager.publish = eager  # type: ignore[method-assign]
    reserve = scheduler.blocks.reserve

    def reserve_and_publish(sequence: Any) -> None:
        reserve(sequence)
        end = len(sequence.token_ids)
        extend(sequence.table, sequence.num_computed, end)
        scheduler.blocks.num_reserved -= sequence.num_reserved
        sequence.num_reserved = 0
        if sequence.keys is not None:
            publish(sequence.table, sequence.keys, sequence.token_ids, end)

    scheduler.blocks.publish = remember  # type: ignore[method-assign]
    scheduler.blocks.reserve = reserve_and_publish  # type: ignore[method-assign]


def _evicted_but_still_indexed(scheduler: Scheduler) -> None:
    scheduler.manager._take = scheduler.manager.pool.take  # type: ignore[method-assign]


def _one_token_too_many(scheduler: Scheduler) -> None:
    match = scheduler.manager.match

    def optimistic(keys: Any, token_ids: Any, max_tokens: int) -> PrefixMatch:
        found = match(keys, token_ids, max_tokens)
        is_partial = found.partial is not None and found.num_tokens % scheduler.limits.block_size
        is_last = (found.num_tokens + 1) % scheduler.limits.block_size == 0
        return (
            found._replace(num_tokens=found.num_tokens + 1) if is_partial and not is_last else found
        )

    scheduler.manager.match = optimistic  # type: ignore[method-assign]


def _digests_believed(scheduler: Scheduler) -> None:
    index = scheduler.manager.index
    index.child = lambda parent, tokens, digest: index._by_digest.get(digest)  # type: ignore[method-assign]


def _merged_without_telling_the_worker(scheduler: Scheduler) -> None:
    scheduler.planner.builder.replace_block = lambda row, entry, block: None  # type: ignore[method-assign]


def _forks_with_the_parents_seed(scheduler: Scheduler) -> None:
    new_sequence = scheduler._new_sequence

    def same_seed(request: Any, index: int, token_ids: list[int]) -> Any:
        sequence = new_sequence(request, index, token_ids)
        sequence.sampling = request.sampling
        return sequence

    scheduler._new_sequence = same_seed  # type: ignore[method-assign]


def _failures_kept(scheduler: Scheduler) -> None:
    release, manager = scheduler.blocks.release, scheduler.manager

    def keep_all(sequence: Any) -> None:
        request, error = sequence.request, sequence.request.error
        if error is not None and sequence.keys is not None:
            sequence.num_computed = min(sequence.table.num_filled, len(sequence.token_ids))
            manager.publish(
                sequence.table, sequence.keys, sequence.token_ids, sequence.num_computed
            )
            request.error = None
        release(sequence)
        request.error = error

    scheduler.blocks.release = keep_all  # type: ignore[method-assign]


def _leaks_on_abort(scheduler: Scheduler) -> None:
    release = scheduler.blocks.release

    def leaky(sequence: Any) -> None:
        sequence.table.blocks[:1] = []
        release(sequence)

    scheduler.blocks.release = leaky  # type: ignore[method-assign]


_SABOTAGES = [
    _no_copy_on_write, _copies_forgotten, _released_too_early, _wrong_block_in_the_plan,
    _published_before_computed, _evicted_but_still_indexed, _one_token_too_many, _digests_believed,
    _merged_without_telling_the_worker, _forks_with_the_parents_seed, _failures_kept,
    _leaks_on_abort,
]  # fmt: skip


def _provoking(seed: int) -> Scenario:
    scenario = make_scenario(seed)
    limits = replace(scenario.limits, enable_prefix_caching=True)
    faults = Faults(300, abort=0.05, poison=0.2, preempt=0.1)
    return replace(
        scenario, limits=limits, faults=faults, hash="colliding" if seed % 2 else "keyed"
    )


def _is_caught(
    sabotage: Callable[[Scheduler], None] | None, *, is_audited: bool, num_seeds: int = 100
) -> bool:
    for seed in range(num_seeds):
        try:
            Simulation(_provoking(seed), is_audited=is_audited, sabotage=sabotage).run()
        except SimulationError:
            return True
    return False


@pytest.mark.slow_combinations
@pytest.mark.parametrize("sabotage", _SABOTAGES)
@pytest.mark.parametrize("is_audited", [True, False], ids=["audit", "oracle alone"])
def test_a_broken_engine_is_caught(sabotage: Callable[[Scheduler], None], is_audited: bool) -> None:
    assert _is_caught(sabotage, is_audited=is_audited)


@pytest.mark.slow
def test_the_engine_as_it_is_passes_what_catches_the_broken_ones() -> None:
    assert not _is_caught(None, is_audited=True, num_seeds=40)
