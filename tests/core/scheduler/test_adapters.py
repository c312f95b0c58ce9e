"""Adapters as a prerequisite: who waits for which, what is forgotten for whom, and that no wait is for ever."""

from __future__ import annotations

from collections.abc import Sequence as List

from quire.config.limits import SchedulerLimits
from quire.core.adapters import ADAPTERS, FORGET_ALL, Adapter, AdapterOrder, AdapterVerdict
from quire.core.plan import Record, RowSampling, StepPlan
from quire.core.request import FinishReason
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.adapters import MAX_LOAD_S, PATIENCE_S, LoadedAdapters
from quire.core.scheduler.scheduler import Scheduler
from quire.executor.null import NullExecutor


class Loader:
    """A companion that loads in no time, or when told to, and checks what it is asked to keep."""

    name = ADAPTERS

    def __init__(self, max_loaded: int) -> None:
        self.loaded: set[str] = set()
        self.orders: list[AdapterOrder] = []
        self.is_slow = False
        self.broken: set[str] = set()
        self._max_loaded, self._done = max_loaded, list[AdapterVerdict]()
        self._of_row: dict[int, str] = {}

    def begin(self, plan: StepPlan) -> None:
        for row in plan.removed_rows:
            self._of_row.pop(row, None)
        for order in map(AdapterOrder._make, plan.orders.get(ADAPTERS, ())):
            self.orders.append(order)
            if order == FORGET_ALL:
                self.loaded.clear()
                self.orders.clear()
            elif order.folder is None:
                assert order.digest not in self._of_row.values(), "a row still uses it"
                self.loaded.discard(order.digest)
        for new in plan.new_rows:
            if new.sampling.adapter is not None:
                self._of_row[new.row] = new.sampling.adapter.digest
        assert set(self._of_row.values()) <= self.loaded

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        if self.is_slow:
            return ()
        asked = [each for each in self.orders if each.folder is not None]
        self.orders = []
        for order in asked:
            if order.digest not in self.broken:
                self.loaded.add(order.digest)
                assert len(self.loaded) <= self._max_loaded
        return tuple(
            AdapterVerdict(
                each.digest, "is broken" if each.digest in self.broken else None, each.number
            )
            for each in asked
        )

    def close(self) -> None:
        pass


class Engine:
    """A scheduler with adapters and an executor without a model."""

    def __init__(self, max_active: int = 2, max_loaded: int = 3, max_num_seqs: int = 8) -> None:
        limits = SchedulerLimits(num_blocks=64, max_num_seqs=max_num_seqs)
        self.loader = Loader(max_loaded)
        self.scheduler = Scheduler(limits, prerequisites=[LoadedAdapters(max_active, max_loaded)])
        self._executor = NullExecutor(max_num_seqs, 64, limits.block_size, companions=[self.loader])
        self.now = 0.0
        self.ended: dict[str, float] = {}
        self.errors: dict[str, str | None] = {}

    def add(
        self, name: str, adapter: str | None = None, max_tokens: int = 4, num_sequences: int = 1
    ) -> None:
        sampling = RowSampling(adapter=None if adapter is None else Adapter(adapter, "folder"))
        prompt = tuple(range(3, 9))
        spec = RequestSpec(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            num_sequences=num_sequences,
        )
        self.scheduler.add(spec)

    def step(self, seconds: float = 0.01) -> list[str]:
        """Who computed in one step."""
        plan = self.scheduler.schedule(self.now)
        rows = {each.row: each.request.request_id for each in self.scheduler.running}
        worked = [rows[work.row] for work in plan.work]
        self.now += seconds
        for sequence, token_id, _ in self.scheduler.update(
            plan, self._executor.execute(plan), self.now
        ):
            if token_id is None:
                name = sequence.request.request_id
                self.ended[name] = self.now
                assert sequence.finish_reason is not None
                is_error = sequence.finish_reason is FinishReason.ERROR
                self.errors[name] = sequence.request.error if is_error else None
        return worked

    def run(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests never end")


def test_a_cold_adapter_delays_its_own_requests_alone() -> None:
    engine = Engine()
    engine.loader.is_slow = True
    engine.add("cold", "a")
    engine.add("base")
    assert [engine.step() for _ in range(3)] == [["base"]] * 3
    engine.loader.is_slow = False
    engine.run()
    assert engine.ended["base"] < engine.ended["cold"]
    assert engine.errors == {"base": None, "cold": None}


def test_requests_of_a_broken_adapter_fail_and_no_others() -> None:
    engine = Engine()
    engine.loader.broken = {"b"}
    for name, adapter in (("one", "a"), ("two", "b"), ("three", "b"), ("four", None)):
        engine.add(name, adapter)
    engine.run()
    assert engine.errors == {"one": None, "two": "is broken", "three": "is broken", "four": None}


def test_a_wait_for_a_file_ends() -> None:
    engine = Engine()
    engine.loader.is_slow = True
    engine.add("cold", "a")
    engine.step()
    engine.step(MAX_LOAD_S + 1)
    engine.step()
    assert "not loaded within" in (engine.errors["cold"] or "")


def test_no_more_adapters_are_used_at_once_than_allowed() -> None:
    engine = Engine(max_active=2, max_loaded=3)
    for number in range(6):
        engine.add(str(number), "abc"[number % 3], max_tokens=5)
    engine.add("base", max_tokens=30)
    while engine.scheduler.has_work:
        engine.step()
        used = {each.sampling.adapter.digest for each in engine.scheduler.running
                if each.sampling.adapter is not None}  # fmt: skip
        assert len(used) <= 2
    assert set(engine.errors.values()) == {None}


def test_adapters_in_use_stay_and_the_least_recently_used_one_goes() -> None:
    engine = Engine(max_active=2, max_loaded=2)
    engine.add("first", "a", max_tokens=2)
    engine.run()
    engine.add("long", "b", max_tokens=40)
    for _ in range(5):
        engine.step()
    assert engine.loader.loaded == {"a", "b"}
    engine.add("third", "c")
    for _ in range(3):
        engine.step()
    assert engine.loader.loaded == {"b", "c"}
    engine.run()


def test_a_steady_stream_of_one_adapter_does_not_starve_another() -> None:
    engine = Engine(max_active=1, max_loaded=1)
    for number in range(4):
        engine.add(f"a{number}", "a", max_tokens=20)
        engine.step()
    engine.add("b", "b")
    for number in range(4, 400):
        if "b" in engine.ended:
            break
        engine.add(f"a{number}", "a", max_tokens=20)
        for _ in range(5):
            engine.step()
    assert engine.ended["b"] < PATIENCE_S + 1.0
    engine.run(20_000)
    assert set(engine.errors.values()) == {None}


def test_aborted_requests_wait_no_more() -> None:
    engine = Engine()
    engine.loader.is_slow = True
    engine.add("cold", "a")
    engine.step()
    engine.scheduler.abort("cold")
    assert not engine.scheduler.has_work
    engine.loader.is_slow = False
    engine.add("again", "a")
    engine.run()
    assert engine.errors["again"] is None


def test_many_adapters_take_turns_in_a_small_memory() -> None:
    engine = Engine(max_active=2, max_loaded=3, max_num_seqs=4)
    names: List[str] = [f"{number}" for number in range(200)]
    for place, name in enumerate(names):
        engine.add(name, f"adapter-{place * place % 17}", max_tokens=1 + place % 5)
        engine.step()
    engine.run(20_000)
    assert sorted(engine.ended) == sorted(names)
    assert set(engine.errors.values()) == {None}


def test_what_has_begun_goes_on_beside_its_sibling_though_others_wait() -> None:
    """The search of beams advances only when each has: the one that keeps the adapter in use would
    wait for the other for ever."""
    engine = Engine(max_active=1)
    engine.add("pair", "a", max_tokens=40, num_sequences=2)
    for _ in range(4):
        engine.step()
    engine.add("other", "b")
    engine.step(PATIENCE_S)
    engine.step(PATIENCE_S)
    scheduler = engine.scheduler
    scheduler.planner.preempt(scheduler.running[-1])
    assert engine.step() == ["pair", "pair"]
    engine.run()
    assert engine.ended["pair"] < engine.ended["other"]
