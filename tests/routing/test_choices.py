"""Policies: bounded, deterministic, and the same in every router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.route import ROUTING_POLICIES
from quire.routing.ask import MAX_CHUNKS, Ask, digests
from quire.routing.choices import POLICIES, Balancer, make_balancer
from quire.routing.load import LoadShare, ReplicaLoad
from quire.routing.memory import PrefixMemory
from quire.routing.ranking import ranked, with_room

NAMES = [f"http://10.0.0.{number}:8000" for number in range(1, 5)]


class Router:
    """A balancer with replicas that are all well."""

    def __init__(self, policy: str, names: Sequence[str] = NAMES) -> None:
        self.balancer: Balancer = make_balancer(policy)
        self.loads = [self.balancer.add(name) for name in names]

    def send(self, ask: Ask) -> LoadShare:
        """Choose."""
        return self.balancer.send(ask, self.loads)[0]


def _prompt(*parts: str) -> tuple[int, ...]:
    return digests(b"", "".join(part.ljust(8) for part in parts).encode(), 8)


def _ask(*parts: str, session: str | None = None) -> Ask:
    chunks = _prompt(*parts)
    return Ask(session, chunks, 8, 8 * len(chunks) + 4, 16)


def test_the_options_and_the_policies_are_the_same() -> None:
    assert set(ROUTING_POLICIES) == set(POLICIES)


@given(st.binary(max_size=200), st.integers(0, 200), st.binary(max_size=9))
def test_equal_digests_mean_equal_beginnings(data: bytes, cut: int, other: bytes) -> None:
    changed = data[:cut] + other + data[cut + len(other) :]
    ours, theirs = digests(b"m", data, 8), digests(b"m", changed, 8)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        end = 8 * (number + 1)
        assert (a == b) == (data[:end] == changed[:end])
    assert len(ours) == len(data) // 8
    assert not set(digests(b"n", data, 8)) & set(ours)


def test_a_prompt_buys_bounded_work() -> None:
    assert len(digests(b"", bytes(9 * MAX_CHUNKS), 8)) == MAX_CHUNKS


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=30), st.integers(1, 20))
def test_a_memory_is_bounded_and_matches_what_was_sent_last(
    prompts: list[list[int]], most: int
) -> None:
    memory = PrefixMemory(most)
    for prompt in prompts:
        chunks = [hash(tuple(prompt[: end + 1])) for end in range(len(prompt))]
        memory.add(chunks)
        assert len(memory) <= most
        assert memory.match(chunks) == min(len(chunks), most)


@given(st.text(min_size=1, max_size=20), st.integers(0, 3))
def test_removing_a_replica_moves_only_its_own_keys(key: str, removed: int) -> None:
    loads = [ReplicaLoad(name) for name in NAMES]
    before = ranked(key.encode(), loads)[0]
    rest = [load for load in loads if load.name != NAMES[removed]]
    after = ranked(key.encode(), rest)[0]
    assert before is after or before.name == NAMES[removed]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.floats(1.0, 3.0))
def test_there_is_always_room_somewhere(counts: list[int], factor: float) -> None:
    loads = [ReplicaLoad(str(number), count) for number, count in enumerate(counts)]
    room = with_room(loads, factor)
    assert min(loads, key=lambda load: load.num_requests) in room
    total = sum(counts) + 1
    assert all(load.num_requests + 1 < factor * total / len(counts) + 1 for load in room)


@pytest.mark.slow_except("kv-aware", "session")
@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(data=st.data())
def test_accounts_return_to_nothing_and_nothing_is_left_to_chance(
    policy: str, data: st.DataObject
) -> None:
    asks = data.draw(
        st.lists(
            st.builds(
                lambda parts, session: _ask(*map(str, parts), session=session),
                st.lists(st.integers(0, 3), max_size=4),
                st.sampled_from([None, "a", "b"]),
            ),
            max_size=25,
        )
    )
    ends = data.draw(st.lists(st.booleans(), min_size=len(asks), max_size=len(asks)))
    chosen = []
    for _ in range(2):
        router, flights, names = Router(policy), [], []
        for ask, is_ended in zip(asks, ends, strict=True):
            flight = router.send(ask)
            names.append(flight.load.name)
            flights.append(flight)
            assert flight.load.tokens >= 0
            if is_ended:
                flight.begin_answer()
                flight.end()
        for flight in flights:
            flight.end()
            flight.end()
        chosen.append(names)
        assert [(load.num_requests, load.tokens) for load in router.loads] == [(0, 0)] * 4
        assert sum(load.num_chosen for load in router.loads) == len(asks)
    assert chosen[0] == chosen[1]


def test_round_robin_takes_turns_and_least_load_the_idlest() -> None:
    router = Router("round-robin")
    assert [router.send(_ask("a")).load.name for _ in range(5)] == [*NAMES, NAMES[0]]
    router = Router("least-load")
    flights = [router.send(_ask("a")) for _ in range(4)]
    assert [flight.load.name for flight in flights] == NAMES
    flights[2].end()
    assert router.send(_ask("b")).load.name == NAMES[2]


@pytest.mark.parametrize("policy", ["session", "prefix-aware"])
def test_routers_agree_without_having_talked(policy: str) -> None:
    """Turns of conversations with a common beginning, each by another router, in another order of
    replicas."""
    routers = [Router(policy), Router(policy, NAMES[::-1]), Router(policy)]
    for router in routers:  # what everybody begins with is everywhere already
        for load in router.loads:
            router.balancer.send(_ask("system"), [load])[0].end()
    for number in range(50):
        names, parts = set(), ["system", f"user {number}"]
        for turn in range(3):
            flight = routers[(number + turn) % 3].send(_ask(*parts, session=f"s{number}"))
            flight.end()
            names.add(flight.load.name)
            parts.append(f"turn {turn}")
        assert len(names) == 1


@pytest.mark.parametrize("policy", ["session", "prefix-aware", "kv-aware"])
def test_what_is_hot_does_not_overload_a_replica(policy: str) -> None:
    router, flights, worst = Router(policy), [], 0.0
    for number in range(400):
        parts = ("hot", "hotter", f"q{number}") if number % 5 else (f"other {number}", "x")
        flights.append(router.send(_ask(*parts, session="hot" if number % 5 else None)))
        if len(flights) > 64:
            counts = [load.num_requests for load in router.loads]
            worst = max(worst, max(counts) / (sum(counts) / len(counts)))
            flights.pop(0).end()
    assert worst < 1.3
    chosen = [load.num_chosen for load in router.loads]
    assert max(chosen) / (sum(chosen) / 4) < 1.3


@pytest.mark.parametrize("policy", ["prefix-aware", "kv-aware"])
def test_conversations_stay_where_their_prefix_is(policy: str) -> None:
    router, homes = Router(policy), Counter[str]()
    for number in range(40):
        parts, names = [f"user {number}", "hello"], set()
        for turn in range(4):
            flight = router.send(_ask(*parts))
            flight.end()
            names.add(flight.load.name)
            parts += [f"answer {turn}", f"question {turn}"]
        assert len(names) == 1
        homes.update(names)
    assert len(homes) == 4


def test_kv_aware_leaves_a_prefix_when_waiting_costs_more_than_computing_it() -> None:
    router = Router("kv-aware", NAMES[:2])
    home = router.send(_ask("long", "prefix")).load
    names = []
    for number in range(20):
        names.append(router.send(_ask("long", "prefix", f"x{number}")).load.name)
    assert names[0] == home.name or len(set(names)) == 2
    assert abs(names.count(NAMES[0]) - names.count(NAMES[1])) <= 6


def test_a_replaced_replica_is_not_remembered() -> None:
    router = Router("kv-aware")
    home = router.send(_ask("a", "b", "c"))
    home.end()
    ask = _ask("a", "b", "c", "d")
    flight, num_cached = router.balancer.send(ask, [home.load])
    flight.end()
    assert num_cached == 24
    router.balancer.forget(home.load.name)
    assert router.balancer.send(ask, [home.load])[1] == 0
