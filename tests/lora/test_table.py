"""Both halves of adapters together, where one has lost track of the other: steps whose outcome is lost, a control plane
that starts over, files that take too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import pytest
import torch

from quire.config.limits import SchedulerLimits
from quire.core.adapters import Adapter, AdapterOrder
from quire.core.plan import RowSampling, StepPlan, StepResult
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.adapters import MAX_LOAD_S, LoadedAdapters
from quire.core.scheduler.scheduler import Scheduler
from quire.errors import CheckpointError
from quire.executor.null import NullExecutor
from quire.kernels.lora import PackedAdapter
from quire.lora.table import AdapterTable

WAIT_S = 20.0
NUM_ROWS = 4


class Weights:
    """Stands for what a back end packs."""

    num_bytes = 1


class Files:
    """What adapters are loaded from: folders that open when they are told to."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.broken: set[str] = set()
        self._closed: dict[str, threading.Event] = {}

    def hold(self, folder: str) -> Callable[[], None]:
        """Have the next load of a folder wait; returns what lets it go on."""
        event = self._closed[folder] = threading.Event()
        return event.set

    def load(self, order: AdapterOrder) -> PackedAdapter:
        assert order.folder is not None
        self.loads.append(order.digest)
        event = self._closed.pop(order.folder, None)
        assert event is None or event.wait(WAIT_S)
        if order.folder in self.broken:
            raise CheckpointError("is broken")
        return cast("PackedAdapter", Weights())


class Engine:
    """A scheduler and the table, around an executor without a model."""

    def __init__(self, max_active: int = 1, max_loaded: int = 2) -> None:
        self.files = Files()
        self.noted: list[str | None] = []
        """Folders, of the adapters that may be used."""
        self.table = AdapterTable(
            self.files.load, max_loaded, lambda order, _: self.noted.append(order.folder)
        )
        self.limits = SchedulerLimits(num_blocks=64, max_num_seqs=NUM_ROWS)
        self._sizes = max_active, max_loaded
        self._executor = NullExecutor(NUM_ROWS, 64, self.limits.block_size, companions=[self.table])
        self.now = 0.0
        self.errors: dict[str, str | None] = {}
        self.start_over()

    def start_over(self) -> None:
        """Begin with an empty control plane; the table is not told."""
        self.scheduler = Scheduler(self.limits, prerequisites=[LoadedAdapters(*self._sizes)])

    def add(self, name: str, adapter: str, folder: str = "") -> None:
        sampling = RowSampling(adapter=Adapter(adapter, folder or f"folder of {adapter}"))
        spec = RequestSpec(
            request_id=name, prompt_token_ids=(3, 4, 5), sampling=sampling, max_tokens=3
        )
        self.scheduler.add(spec)

    def launch(self) -> tuple[StepPlan, StepResult]:
        """Plan and compute a step, whose rows' adapters must be there."""
        plan = self.scheduler.schedule(self.now)
        self.now += 0.01
        result = self._executor.execute(plan)
        rows = [work.row for work in plan.work]
        self.table.of_step(rows, torch.arange(len(rows) + 1), torch.ones(len(rows)))
        return plan, result

    def step(self) -> None:
        for sequence, token_id, _ in self.scheduler.update(*self.launch(), self.now):
            if token_id is None:
                self.errors[sequence.request.request_id] = sequence.request.error

    def run(self, seconds: float = 1.0) -> dict[str, str | None]:
        """Compute what there is, in so many seconds of the engine's clock; how each request ended."""
        end = self.now + seconds
        while self.scheduler.has_work and self.now < end:
            self.step()
        errors, self.errors = self.errors, {}
        return errors

    def lose_news_of(self, adapter: str) -> None:
        """Compute steps until the table says that an adapter is loaded, in one that is lost."""
        while True:
            plan, result = self.launch()
            if any(adapter in news for (news, *_) in result.news.get("adapters", ())):
                self.scheduler.lose_flights()
                return
            self.scheduler.update(plan, result, self.now)


def test_an_adapter_whose_news_were_lost_with_a_step_is_ordered_again() -> None:
    engine = Engine()
    engine.add("a", "A")
    engine.lose_news_of("A")
    assert engine.run() == {"a": None}
    assert engine.files.loads == ["A"]


def test_an_order_that_was_lost_with_a_step_is_given_again() -> None:
    engine = Engine()
    engine.add("a", "A")
    engine.scheduler.schedule(engine.now)  # nothing launches this one
    engine.scheduler.lose_flights()
    assert engine.run() == {"a": None}


def test_a_control_plane_that_starts_over_finds_what_it_loads() -> None:
    engine = Engine(max_active=1, max_loaded=2)
    for name in "AB":
        engine.add(name, name)
    assert engine.run() == {"A": None, "B": None}
    engine.start_over()
    for name in "ACA":
        engine.add(name, name)
        assert engine.run() == {name: None}
    assert engine.table.num_bytes <= 2


def test_an_adapter_that_is_in_memory_is_noted_with_the_folder_of_its_last_order() -> None:
    engine = Engine()
    engine.add("a", "A", "first")
    assert engine.run() == {"a": None}
    engine.scheduler.lose_flights()
    engine.add("b", "A", "second")
    assert engine.run() == {"b": None}
    assert engine.files.loads == ["A"] and engine.noted == ["first", "second"]


def test_a_load_that_was_given_up_comes_to_nothing() -> None:
    engine = Engine(max_active=1, max_loaded=1)
    finish = engine.files.hold("folder of A")
    engine.add("a", "A")
    engine.step()
    engine.now += MAX_LOAD_S + 1.0
    assert "not loaded within" in str(engine.run()["a"])
    engine.add("b", "B")
    engine.step()
    finish()
    assert engine.run() == {"b": None}
    assert engine.table.num_bytes == 1
    engine.add("a", "A")
    assert engine.run() == {"a": None}


def test_a_load_that_was_given_up_is_not_taken_for_the_next_one() -> None:
    engine = Engine()
    engine.files.broken = {"first"}
    finish = engine.files.hold("first")
    engine.add("a", "A", "first")
    engine.step()
    engine.now += MAX_LOAD_S + 1.0
    assert "not loaded within" in str(engine.run()["a"])
    engine.add("again", "A", "second")
    engine.step()
    finish()
    assert engine.run() == {"again": None}


def test_who_has_another_copy_does_not_fail_with_the_first_one() -> None:
    """The files of an adapter go with the last request that needs them, which may be while they are read."""
    engine = Engine()
    engine.files.broken = {"first"}
    finish = engine.files.hold("first")
    engine.add("gone", "A", "first")
    engine.step()
    engine.scheduler.abort("gone")
    engine.add("a", "A", "second")
    engine.step()
    finish()
    assert engine.run() == {"a": None}


@pytest.mark.parametrize("num_lost", [1, 2, 5])
def test_lost_steps_cost_no_adapter_its_place(num_lost: int) -> None:
    engine = Engine(max_active=2, max_loaded=2)
    for number in range(12):
        engine.add(f"{number}", "ABC"[number % 3])
    for _ in range(num_lost):
        engine.step()
        engine.launch()
        engine.scheduler.lose_flights()
    assert set(engine.run(20.0).values()) == {None}
    assert engine.table.num_bytes <= 2
