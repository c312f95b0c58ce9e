"""What the records say is what the worker saw: states made again from records alone,
compared with the scheduler's own."""

from __future__ import annotations

import random

import msgspec
import pytest

from quire.config.limits import SchedulerLimits
from quire.core.plan import StepPlan, StepResult, WorkResult
from quire.core.request_spec import RequestSpec, fit
from quire.core.scheduler.scheduler import Scheduler
from quire.engine.loop import recorder as module
from quire.engine.loop.inspection import Inspection
from quire.engine.loop.recorder import StepRecorder

BLOCK_SIZE = 4


class Engine:
    """A scheduler, made-up tokens, and a recorder; remembers the truth of each step."""

    def __init__(self, num_blocks: int = 40, max_num_seqs: int = 8) -> None:
        limits = SchedulerLimits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=24,
            max_model_len=100,
        )
        self.scheduler = Scheduler(limits)
        self.recorder = StepRecorder(self.scheduler)
        self.rng = random.Random(5)
        self.now = 0.0
        self.tables: dict[int, dict[int, list[int]]] = {}
        self.computed: dict[int, dict[int, int]] = {}
        self.tokens: dict[int, dict[int, list[int]]] = {}
        self.cached: dict[int, set[int]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int, n: int = 1) -> None:
        spec = RequestSpec(
            request_id=name, prompt_token_ids=tuple(prompt), num_sequences=n, max_tokens=max_tokens,
            stop_token_ids=frozenset({2}), arrival_s=self.now,
        )  # fmt: skip
        self.scheduler.add(fit(spec, self.scheduler.limits))

    def step(self) -> StepPlan:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.recorder.begin(plan, self.now)
        resident = [each for each in self.scheduler.running if each.is_resident]
        self.tables[plan.step_id] = {each.row: each.table.blocks.copy() for each in resident}
        self.computed[plan.step_id] = {each.row: each.num_computed for each in resident}
        self.computed[plan.step_id] |= {
            work.row: work.start + work.num_tokens for work in plan.work
        }
        self.tokens[plan.step_id] = {each.row: each.token_ids.copy() for each in resident}
        # Whoever is at the same place gains the same, so that forks come to hold identical blocks.
        results = tuple(
            WorkResult((3 + (w.start + w.num_tokens) * 7 % 190,) * w.num_samples) for w in plan.work
        )
        self.scheduler.update(plan, StepResult(plan.step_id, results), self.now + 0.5)
        self.recorder.end(self.now + 0.5)
        self.cached[plan.step_id] = {
            block for node in self.scheduler.manager.index.nodes() for block in node.blocks
        }
        return plan

    def burst(self, num_steps: int) -> None:
        """Random requests with common beginnings, some of several sequences,
        in too little memory."""
        for number in range(num_steps):
            if self.rng.random() < 0.4:
                common = [50 + self.rng.randrange(2)] * self.rng.randrange(1, 14)
                prompt = [
                    *common,
                    *(self.rng.randrange(3, 200) for _ in range(self.rng.randrange(1, 20))),
                ]
                self.add(
                    f"r{number}", prompt, self.rng.randrange(1, 30), self.rng.choice((1, 1, 1, 3))
                )
            if self.rng.random() < 0.05 and self.scheduler.requests:
                self.scheduler.abort(self.rng.choice(list(self.scheduler.requests)))
            self.step()


def _replay(
    inspection: Inspection,
) -> dict[int, tuple[dict[int, list[int]], dict[int, int], set[int]]]:
    """(tables, computed tokens, cached blocks) after each record,
    from what an asker is told and nothing else."""
    assert inspection.base is not None
    tables = {row.row: list(row.blocks) for row in inspection.base.rows}
    computed = {row.row: row.num_computed for row in inspection.base.rows}
    cached = set(inspection.base.cached)
    states = {}
    for step in inspection.steps:
        for row, _ in step.removed:
            del tables[row], computed[row]
        for entry in step.entered:
            tables[entry.row], computed[entry.row] = list(entry.blocks), entry.num_hit_tokens
        for row, place, block in step.replaced:
            tables[row][place] = block
        for row, blocks in step.appended:
            tables[row].extend(blocks)
        for row in step.decoded:
            computed[row] += 1
        for row, start, count, _ in step.chunks:
            computed[row] = start + count
        for block in step.published:
            cached.add(block) if block >= 0 else cached.discard(~block)
        states[step.step] = (
            {row: blocks.copy() for row, blocks in tables.items()},
            computed.copy(),
            cached.copy(),
        )
    return states


@pytest.mark.parametrize("max_steps", [512, 20])
def test_every_step_can_be_made_again(monkeypatch: pytest.MonkeyPatch, max_steps: int) -> None:
    """Also where most steps have left the ring, through preemptions, forks, merges,
    copies and evictions."""
    monkeypatch.setattr(module, "MAX_STEPS", max_steps)
    engine = Engine()
    engine.burst(300)
    inspection = engine.recorder.inspect("", -1, engine.now)
    states = _replay(inspection)
    assert len(states) == min(max_steps, 300)
    for step, (tables, computed, cached) in states.items():
        assert tables == engine.tables[step]
        assert cached == engine.cached[step]
        assert computed == engine.computed[step]
        assert all(len(blocks) * BLOCK_SIZE >= computed[row] for row, blocks in tables.items())
    manager, stats = engine.scheduler.manager, engine.scheduler.stats
    assert (
        min(stats.num_preemptions, manager.num_copies, manager.num_evictions, manager.num_merges)
        > 0
    )
    assert stats.num_computed_tokens >= sum(step.num_tokens for step in inspection.steps)
    reasons = {why for step in inspection.steps for _, why in step.removed}
    assert reasons <= {"length", "abort", "preempted", "stop"} and (
        max_steps < 300 or "preempted" in reasons
    )


def test_positions_follow_the_work() -> None:
    engine = Engine()
    engine.add("long", [*range(10, 60)], 5)
    plans = [engine.step() for _ in range(5)]
    states = _replay(engine.recorder.inspect("", -1, 0.0))
    assert [states[plan.step_id][1][0] for plan in plans] == [24, 48, 50, 51, 52]
    steps = engine.recorder.inspect("", -1, 0.0).steps
    assert [step.decoded for step in steps] == [(), (), (), (0,), (0,)]
    assert [step.chunks for step in steps[:3]] == [
        ((0, 0, 24, 0),),
        ((0, 24, 24, 0),),
        ((0, 48, 2, 1),),
    ]
    assert [step.elapsed_s for step in steps] == [0.5] * 5


def test_an_asker_who_follows_is_told_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STEPS", 8)
    engine = Engine()
    engine.burst(10)
    first = engine.recorder.inspect("", -1, 0.0)
    engine.burst(3)
    more = engine.recorder.inspect(first.engine, first.last_step, 0.0)
    assert more.base is None and [step.step for step in more.steps] == [11, 12, 13]
    assert engine.recorder.inspect(first.engine, more.last_step, 0.0).steps == ()
    for name, since in (("another", more.last_step), (first.engine, 2), (first.engine, 10**9)):
        everything = engine.recorder.inspect(name, since, 0.0)
        assert (
            everything.base is not None and everything.base.step == 5 and len(everything.steps) == 8
        )


def test_what_a_block_held_is_known_for_every_step_of_the_ring() -> None:
    engine = Engine(num_blocks=24)
    engine.burst(120)
    for step, tables in engine.tables.items():
        for row, blocks in tables.items():
            block = blocks[0]
            content = engine.recorder.content(block, step)
            assert content is not None and content.position == 0 and content.owners
            assert list(content.token_ids) == engine.tokens[step][row][: len(content.token_ids)]
            assert len(content.owners) == sum(block in each for each in tables.values())
    unused = set(range(24)) - {block for blocks in engine.tables[120].values() for block in blocks}
    cached = next(iter(unused & engine.cached[120]))
    content = engine.recorder.content(cached, 120)
    node = engine.scheduler.manager.index.node_of(cached)
    assert (
        content is not None
        and node is not None
        and content.token_ids == node.tokens
        and content.is_cached
    )
    for block, step in ((24, 5), (-1, 5), (3, 121), (3, -1)):
        assert engine.recorder.content(block, step) is None


def test_who_waits_and_why() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("first", [*range(10, 20)], 20)
    engine.step()
    for number in range(3):
        engine.add(f"w{number}", [number + 70] * 9, 5)
    engine.step()
    inspection = engine.recorder.inspect("", -1, engine.now + 1.0)
    assert [(each.name, each.row, each.waits_for) for each in inspection.requests] == [
        ("first", 0, None),
        ("w0", -1, "all 1 rows are taken"),
        ("w1", -1, "1 before it in the order of service"),
        ("w2", -1, "2 before it in the order of service"),
    ]
    assert inspection.requests[1].age_s == 2.0
    assert (inspection.steps[-1].num_waiting, inspection.steps[-1].waits_for) == (
        3,
        "all 1 rows are taken",
    )


def test_a_prefix_in_the_making_is_waited_for_by_name() -> None:
    engine = Engine()
    engine.add("a", [*range(10, 40)], 5)
    engine.add("b", [*range(10, 50)], 5)
    engine.step()
    engine.step()
    (_, waiting) = engine.recorder.inspect("", -1, 0.0).requests
    assert waiting.name == "b" and waiting.waits_for is not None and "prefix" in waiting.waits_for


def test_rows_that_ended_with_the_last_step_are_named() -> None:
    engine = Engine()
    engine.add("a", [10, 11, 12], 2)
    engine.step()
    assert engine.recorder.inspect("", -1, 0.0).gone_rows == ()
    engine.step()
    assert engine.recorder.inspect("", -1, 0.0).gone_rows == (0,)


@pytest.mark.parametrize("name, limit", [("MAX_WORK", 50), ("MAX_TOKENS", 60)])
def test_the_ring_is_bounded_by_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(module, name, limit)
    engine = Engine()
    engine.burst(100)
    inspection = engine.recorder.inspect("", -1, 0.0)
    held = {
        "MAX_WORK": sum(len(step.decoded) + len(step.chunks) for step in inspection.steps),
        "MAX_TOKENS": sum(
            entry.num_known_tokens for step in inspection.steps for entry in step.entered
        ),
    }
    assert 0 < held[name] <= limit and len(inspection.steps) < 100
    assert _replay(inspection)[100][0] == engine.tables[100]


def test_it_travels() -> None:
    engine = Engine()
    engine.burst(50)
    inspection = engine.recorder.inspect("", -1, 0.0)
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(inspection), type=Inspection) == inspection
