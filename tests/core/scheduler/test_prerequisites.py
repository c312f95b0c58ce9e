"""Features that a scheduler does not know: what sequences lack is ordered,
waited for aside from the queue, and has an end."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from quire.core.plan import Record, StepPlan
from quire.core.request import FinishReason, Sequence
from quire.core.scheduler.prerequisites import Settled


class Fetch(NamedTuple):
    """An order: what belongs to a tenant is to be fetched."""

    tenant: str


class Fetched(NamedTuple):
    """The news that it is there, or why it never will be."""

    tenant: str
    error: str | None = None


class TenantData:
    """The control plane's half."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ready = {""}
        self._parked: dict[str, list[Sequence]] = {}
        self._ordered: set[str] = set()

    def refusal(self, sequence: Sequence) -> str | None:
        return None if sequence.request.tenant in self._ready else f"waits for {self.name}"

    def park(self, sequence: Sequence) -> None:
        self._parked.setdefault(sequence.request.tenant, []).append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        if sequence in self._parked.get(sequence.request.tenant, ()):
            self._parked[sequence.request.tenant].remove(sequence)

    def parked(self) -> list[Sequence]:
        return [sequence for parked in self._parked.values() for sequence in parked]

    def take_orders(self, now: float) -> tuple[Record, ...]:
        new = [tenant for tenant in self._parked if tenant not in self._ordered]
        self._ordered.update(new)
        return tuple(map(Fetch, new))

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        settled = []
        for tenant, error in news:
            self._ordered.discard(tenant)
            settled.append(Settled(self._parked.pop(tenant, []), error))
            if error is None:
                self._ready.add(tenant)
        return settled

    def lose_flights(self) -> None:
        self._ordered.clear()


class Fetcher:
    """The worker's half: has what was ordered one step later, but for a tenant called "nobody"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self._todo: list[str] = []
        self._done: list[Fetched] = []

    def begin(self, plan: StepPlan) -> None:
        self._done = [
            Fetched(tenant, "no such tenant" if tenant == "nobody" else None)
            for tenant in self._todo
        ]
        self._todo = [tenant for (tenant,) in plan.orders.get(self.name, ())]

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        done, self._done = self._done, []
        return tuple(done)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def run(harness: Any) -> Any:
    names = ("keys", "files")
    return harness(
        prerequisites=[TenantData(name) for name in names],
        companions=[Fetcher(name) for name in names],
    )


def test_a_sequence_runs_once_every_prerequisite_is_there(run: Any) -> None:
    first, second = run.add("a", 5, tenant="acme"), run.add("b", 5, tenant="acme")
    plans = [run.step() for _ in range(5)]
    assert [plan.orders for plan in plans] == [
        {"keys": (("acme",),)},
        {},
        {"files": (("acme",),)},
        {},
        {},
    ]
    assert [len(plan.new_rows) for plan in plans] == [0, 0, 0, 0, 2]
    run.run()
    run.check(first)
    run.check(second)


def test_what_waits_holds_up_nothing_and_says_what_it_waits_for(run: Any) -> None:
    request = run.add("a", 5, tenant="acme")
    run.add("b", 5)
    assert [row.name for row in run.step().new_rows] == ["b"]
    assert request.metrics.waited_for == "waits for keys" and run.scheduler.num_waiting == 1
    run.scheduler.abort("a")
    assert run.scheduler.num_waiting == 0
    run.run()


def test_nobody_is_preempted_for_what_cannot_run_yet(harness: Any) -> None:
    run = harness(
        max_num_seqs=1,
        policy="priority",
        prerequisites=[TenantData("keys")],
        companions=[Fetcher("keys")],
    )
    running = run.add("a", 12, tenant="acme", priority=1)
    while not running.sequences[0].num_computed:
        run.step()
    urgent = run.add("b", 2, tenant="other")
    plan = run.step()
    assert plan.orders == {"keys": (("other",),)} and running.metrics.num_preemptions == 0
    assert [work.row for work in plan.work] == [0], "it goes on meanwhile"
    run.run()
    assert running.metrics.num_preemptions == 1, "once the other may run"
    assert urgent.metrics.finished_s < running.metrics.finished_s
    run.check(running)
    run.check(urgent)


def test_what_cannot_be_had_ends_the_requests_that_need_it(run: Any) -> None:
    lost, served = run.add("a", 5, tenant="nobody"), run.add("b", 5, tenant="acme")
    run.run()
    run.check(served)
    assert lost.error == "no such tenant" and lost.sequences[0].finish_reason is FinishReason.ERROR


def test_orders_without_a_companion_are_a_bug(harness: Any) -> None:
    run = harness(prerequisites=[TenantData("keys")])
    run.add("a", 5, tenant="acme")
    with pytest.raises(AssertionError, match=r"'keys'.*which this executor lacks"):
        run.step()


class Seats:
    """A resource that no scheduler knows: so many sequences of a tenant may run at a time."""

    def __init__(self, num_seats: int) -> None:
        self.num_free = num_seats

    def refusal(self, sequence: Sequence) -> str | None:
        return None if self.num_free else "all seats are taken"

    def reserve(self, sequence: Sequence) -> None:
        self.num_free -= 1

    def release(self, sequence: Sequence) -> None:
        self.num_free += 1


def test_a_resource_of_a_feature_bounds_admission_like_any_other(harness: Any) -> None:
    seats = Seats(2)
    run = harness(resources=[seats])
    requests = [run.add(str(number), 5) for number in range(5)]
    run.step()
    assert len(run.scheduler.running) == 2 and seats.num_free == 0
    assert run.scheduler.waiting.sequences()[0].waits_for == "all seats are taken"
    run.run()
    for request in requests:
        run.check(request)
    assert seats.num_free == 2


def test_what_a_resource_frees_by_itself_is_noticed(harness: Any) -> None:
    seats = Seats(1)
    run = harness(resources=[seats])
    run.add("a", 5, max_tokens=20)
    run.add("b", 5)
    run.step()
    run.step()
    assert [sequence.name for sequence in run.scheduler.running] == ["a"]
    seats.num_free += 1
    run.step()
    assert [sequence.name for sequence in run.scheduler.running] == ["a", "b"]
    run.run()
