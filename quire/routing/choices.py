"""The five policies, and the one object that a router or a simulator holds: `Balancer`.

A policy chooses among replicas that can take the request; health is not its business. Ties are
never broken by chance: equal routers with equal histories choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quire.routing.ask import Ask
from quire.routing.load import LoadShare, ReplicaLoad
from quire.routing.observed import ObservedMemory
from quire.routing.ranking import ranked, with_room

LOAD_FACTORS: Mapping[str, float] = {"kv-aware": 1.5}
DEFAULT_LOAD_FACTOR = 1.3
"""Of the mean of requests in flight, what one replica may have before a session or a prefix goes
elsewhere. The KV-aware policy balances by itself once a prefix is in several places, and may
deviate more until then: with 1.3 it kept 88 % of the hits in place of 98 %."""
LOAD_WEIGHT = 0.05
"""Of a token in flight, against a prompt token that a replica lacks: a wait passes, but what is
computed twice is lost to all. Simulated over four replicas, 600 requests of a production trace
(`tests/sim/test_fleet.py`): with 1, 71 % of the hits that one large replica has; with 0.1, 97 %;
with 0.05, 98 %, and waits as short."""
DEFAULT_MEMORY_CHUNKS = 1 << 16
"""For each replica: 8 million tokens in chunks of 128, in some 7 MB."""

Loads = Sequence[ReplicaLoad]
Memories = Mapping[str, ObservedMemory]


class RoutingPolicy(Protocol):
    """A way to choose. `loads` is not empty, and in the order in which replicas were added."""

    def choose(self, ask: Ask, loads: Loads, memories: Memories) -> ReplicaLoad:
        """Return the replica for a request."""
        ...


class RoundRobin:
    """Each in turn."""

    def __init__(self, load_factor: float) -> None:
        self._num_chosen = 0

    def choose(self, ask: Ask, loads: Loads, memories: Memories) -> ReplicaLoad:
        """See `RoutingPolicy`."""
        self._num_chosen += 1
        return loads[(self._num_chosen - 1) % len(loads)]


class LeastLoad:
    """The one with the fewest tokens in flight; among equals, the one chosen least often."""

    def __init__(self, load_factor: float) -> None:
        pass

    def choose(self, ask: Ask, loads: Loads, memories: Memories) -> ReplicaLoad:
        """See `RoutingPolicy`."""
        return min(loads, key=_load_order)


class Sessions:
    """A session's replica is the same in every router, unless it has no room. A request without a
    session goes where the load is least."""

    def __init__(self, load_factor: float) -> None:
        self._load_factor = load_factor

    def choose(self, ask: Ask, loads: Loads, memories: Memories) -> ReplicaLoad:
        """See `RoutingPolicy`."""
        if ask.session is None:
            return min(loads, key=_load_order)
        room = with_room(loads, self._load_factor)
        return ranked(ask.session.encode("utf-8", "surrogatepass"), room)[0]


class PrefixAware:
    """The longest beginning that was sent somewhere, among replicas with room.

    Among those that know equally much, the hash of the first chunk that none of them knows decides:
    that of a conversation, once a beginning which many share is everywhere. So routers agree that
    have never seen each other's requests.
    """

    def __init__(self, load_factor: float) -> None:
        self._load_factor = load_factor

    def choose(self, ask: Ask, loads: Loads, memories: Memories) -> ReplicaLoad:
        """See `RoutingPolicy`."""
        if not ask.chunks:
            return min(loads, key=_load_order)
        room = with_room(loads, self._load_factor)
        matches = [memories[load.name].match(ask.chunks) for load in room]
        most = max(matches)
        best = [load for load, match in zip(room, matches, strict=True) if match == most]
        return ranked(_key(ask, most), best)[0]


class KvAware:
    """The one with the least cost: the prompt tokens that it lacks, and the tokens in flight there
    at `LOAD_WEIGHT`.

    A beginning that many share draws requests until its replica has as many as it may; the next
    one computes it once more, after which that one has it, too.
    """

    def __init__(self, load_factor: float) -> None:
        self._load_factor = load_factor

    def choose(self, ask: Ask, loads: Loads, memories: Memories) -> ReplicaLoad:
        """See `RoutingPolicy`."""
        room = with_room(loads, self._load_factor)
        matches = {load.name: memories[load.name].match(ask.chunks) for load in room}
        costs = [ask.num_uncached(matches[load.name]) + LOAD_WEIGHT * load.tokens for load in room]
        least = min(costs)
        best = [load for load, cost in zip(room, costs, strict=True) if cost == least]
        if len(best) == 1 or not ask.chunks:
            return min(best, key=_load_order)
        return ranked(_key(ask, max(matches[load.name] for load in best)), best)[0]


POLICIES: Mapping[str, Callable[[float], RoutingPolicy]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "session": Sessions,
    "prefix-aware": PrefixAware,
    "kv-aware": KvAware,
}


class Balancer:
    """A policy with what it knows of each replica. Knows no addresses and no health."""

    def __init__(
        self,
        policy: RoutingPolicy,
        max_chunks: int = DEFAULT_MEMORY_CHUNKS,
    ) -> None:
        self._policy = policy
        self._max_chunks = max_chunks
        self._memories: dict[str, ObservedMemory] = {}

    def add(self, name: str) -> ReplicaLoad:
        """Return the account of a new replica."""
        self._memories[name] = ObservedMemory(self._max_chunks)
        return ReplicaLoad(name)

    def remove(self, name: str) -> None:
        """Forget a replica."""
        self._memories.pop(name, None)

    def forget(self, name: str) -> None:
        """Forget what a replica has cached: it was gone for a while."""
        if name in self._memories:
            self._memories[name].clear()

    def memory(self, name: str) -> ObservedMemory | None:
        """Return what is known of a replica's cache, to be told more."""
        return self._memories.get(name)

    def send(self, ask: Ask, loads: Loads) -> tuple[LoadShare, int]:
        """Choose, and account for the request; its flight, and the prompt tokens that the replica
        should have cached.
        """
        return self.account(ask, self.choose(ask, loads))

    def choose(self, ask: Ask, loads: Loads) -> ReplicaLoad:
        """Return the replica for a request, which is not sent there yet."""
        return self._policy.choose(ask, loads, self._memories)

    def account(self, ask: Ask, load: ReplicaLoad) -> tuple[LoadShare, int]:
        """Account for a request that goes to a replica, however it was chosen; returns what `send`
        does."""
        memory = self._memories[load.name]
        num_uncached = ask.num_uncached(memory.match(ask.chunks))
        memory.add(ask)
        num_cached = max(0, ask.num_prompt_tokens - num_uncached)
        return LoadShare(load, num_uncached, ask.num_output_tokens), num_cached


def make_balancer(
    policy: str, load_factor: float | None = None, max_chunks: int = DEFAULT_MEMORY_CHUNKS
) -> Balancer:
    """Return a balancer with a policy of `POLICIES`; no factor is the policy's own."""
    if load_factor is None:
        load_factor = LOAD_FACTORS.get(policy, DEFAULT_LOAD_FACTOR)
    return Balancer(POLICIES[policy](load_factor), max_chunks)


def _load_order(load: ReplicaLoad) -> tuple[float, int, int]:
    return load.tokens, load.num_requests, load.num_chosen


def _key(ask: Ask, num_known: int) -> bytes:
    """Return what tells this prompt from others that begin with the same `num_known` chunks."""
    return ask.chunks[min(num_known, len(ask.chunks) - 1)].to_bytes(8, "little")
