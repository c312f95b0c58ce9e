"""Each invariant, broken on purpose: an audit that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.core.plan import RowWork, StepPlan
from quire.core.request import SequenceStatus
from quire.core.scheduler.audit import audit, audit_plan

Harness = Any
Break = Callable[[Any], None]


def _busy(harness: Harness) -> Any:
    """Two running sequences that share blocks, one that is being prefilled, two in the queue."""
    run = harness(num_blocks=24, block_size=4, max_num_batched_tokens=9, max_num_seqs=4)
    run.add("a", 6, max_tokens=20, num_sequences=2)
    run.step()
    run.add("owner", range(36), max_tokens=3)
    run.add("next", range(37), max_tokens=3)
    run.step()
    run.step()
    run.add("queued", 5)
    audit(run.scheduler)
    return run


def _block_0(run: Any) -> int:
    return int(run.scheduler.running[0].table.blocks[0])


def _set(run: Any, path: str, value: Any) -> None:
    *path_to, name = path.split(".")
    target = run.scheduler
    for part in path_to:
        target = getattr(target, part)
    setattr(target, name, value)


_BREAKS: dict[str, tuple[Break, str]] = {
    "count too high": (
        lambda r: r.scheduler.manager.pool.ref_counts.__setitem__(_block_0(r), 9),
        "owners counted",
    ),
    "freed in use": (
        lambda r: r.scheduler.manager.pool._link(_block_0(r), before=24),
        "is free and has 2 owners",
    ),
    "link broken": (lambda r: r.scheduler.manager.pool._prev.__setitem__(24, 0), "comes after"),
    "num_free": (lambda r: _set(r, "manager.pool.num_free", 3), "num_free=3"),
    "leak": (lambda r: r.scheduler.manager.pool.take(), "1 owners counted, 0 tables"),
    "twice in a table": (
        lambda r: r.scheduler.running[0].table.blocks.append(_block_0(r)),
        "names a block twice",
    ),
    "unused slots": (lambda r: _set(r, "manager.num_unused_slots", 77), "77 unused slots counted"),
    "filled beyond": (
        lambda r: setattr(r.scheduler.running[0].table, "num_filled", 99),
        "99 tokens in",
    ),
    "unpublished": (lambda r: r.scheduler.manager.index.remove(_block_0(r)), "is not cached"),
    "other tokens": (
        lambda r: r.scheduler.running[0].token_ids.__setitem__(0, 7),
        "published with tokens",
    ),
    "other digest": (
        lambda r: setattr(next(iter(r.scheduler.manager.index.nodes())), "digest", b"x"),
        "digest",
    ),
    "unrecorded row": (lambda r: r.scheduler.rows._free.pop(), "rows"),
    "reservation": (lambda r: _set(r, "blocks.num_reserved", 1), "blocks reserved"),
    "order": (lambda r: r.scheduler.running.reverse(), "running list"),
    "parked count": (lambda r: _set(r, "admission.num_parked", 5), "num_parked=5"),
    "lost": (lambda r: r.scheduler.waiting.remove(r.scheduler.waiting.head()), "should be"),
    "computed": (
        lambda r: setattr(r.scheduler.running[0], "num_computed", 99),
        "99 tokens computed of",
    ),
    "holding": (lambda r: setattr(r.scheduler.waiting.head(), "row", 0), "holds something"),
    "stale root": (
        lambda r: r.scheduler.manager.index._roots.update(
            {("x",): r.scheduler.manager.index.root(("x",))}
        ),
        "stale root",
    ),
}


@pytest.mark.parametrize("name", _BREAKS)
def test_a_broken_invariant_is_named(harness: Harness, name: str) -> None:
    run = _busy(harness)
    spoil, message = _BREAKS[name]
    spoil(run)
    with pytest.raises(AssertionError, match=message):
        audit(run.scheduler)


def test_waiting_for_a_block_that_nobody_computes_is_found(harness: Harness) -> None:
    run = harness(block_size=4)
    run.add("owner", range(12))
    run.add("parked", range(12))
    run.scheduler.schedule(0.0)
    audit(run.scheduler)
    run.scheduler.admission.turns._owners.clear()
    with pytest.raises(
        AssertionError, match=r"\['parked'\] wait for a block that no sequence computes"
    ):
        audit(run.scheduler)


def test_a_finished_request_that_is_still_known_is_found(harness: Harness) -> None:
    run = _busy(harness)
    for sequence in run.scheduler.abort("queued").sequences:
        assert sequence.status is SequenceStatus.FINISHED
    run.scheduler.requests["queued"] = (
        next(iter(run.scheduler.requests.values())).sequences[0].request
    )
    with pytest.raises(AssertionError):
        audit(run.scheduler)


def test_the_shallow_audit_skips_the_digests_only(harness: Harness) -> None:
    run = _busy(harness)
    run.scheduler.running[0].token_ids[0] = 7
    audit(run.scheduler, deep=False)
    run.scheduler.admission.num_parked = 9
    with pytest.raises(AssertionError, match="num_parked"):
        audit(run.scheduler, deep=False)


def test_plans_are_audited_before_they_are_carried_out(harness: Harness) -> None:
    run = _busy(harness)
    sequence = run.scheduler.running[0]
    row, start = sequence.row, sequence.num_computed
    for work, message in (
        ((RowWork(row, start, 10),), "10 tokens in a step"),
        ((RowWork(row, start, 1), RowWork(row, start, 1)), "work twice"),
        ((RowWork(row, start + 1, 1),), "computed"),
        ((RowWork(row, start, 3),), "beyond the known"),
        ((), "nothing is scheduled"),
    ):
        with pytest.raises(AssertionError, match=message):
            audit_plan(run.scheduler, StepPlan(1, work=work))


def test_writing_to_a_shared_block_is_found(harness: Harness) -> None:
    run = harness()
    run.add("a", 6, max_tokens=20, num_sequences=2)
    run.step()
    sequence = run.scheduler.running[0]
    with pytest.raises(AssertionError, match="which has 2 owners"):
        audit_plan(run.scheduler, StepPlan(1, work=(RowWork(sequence.row, 6, 1),)))
