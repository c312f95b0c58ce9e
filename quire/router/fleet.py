"""The back ends: which there are, which can be sent requests, and what is on its way to each.

Owns a client, a breaker and an account for every back end. Decides with the balancer; hears of
health from served requests and from probes (`prober`). Everything is in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from quire.common.http_client import Address, HttpClient
from quire.config.route import RouteConfig
from quire.errors import ConfigError
from quire.router.health import Breaker, BreakerState
from quire.routing.ask import Ask
from quire.routing.choices import Balancer
from quire.routing.load import LoadShare, ReplicaLoad
from quire.routing.observed import ObservedMemory
from quire.server.http.errors import ApiError, overloaded

logger = logging.getLogger(__name__)

MAX_BACKENDS = 1024
_RETRY_S = 5.0


class Replica:
    """One back end."""

    def __init__(self, name: str, load: ReplicaLoad, client: HttpClient) -> None:
        self.name = name
        """Its URL."""
        self.load = load
        self.client = client
        self.breaker = Breaker()
        self.is_draining = False
        """Whether it is sent nothing more."""
        self.is_leaving = False
        """Whether it will be forgotten then."""
        self.source: str | None = None
        """The name whose resolution brought it, if one did."""
        self.models: frozenset[str] | None = None
        """Which it serves, where it has said so."""
        self.models_number = 0
        """Of the question that this answers: an earlier one may be answered later."""
        self.trips: set[Trip] = set()
        self.num_by_outcome: dict[str, int] = {}
        self.num_prompt_tokens = self.num_cached_tokens = 0
        """Estimates: of the prompts that were sent there, and of them what it should have
        cached."""

    def serves(self, model: str | None) -> bool:
        """Return whether it may have this model."""
        return model is None or self.models is None or model in self.models


class Trip:
    """One request at one replica, from the choice to its end."""

    def __init__(self, replica: Replica, flight: LoadShare) -> None:
        self.replica = replica
        self.flight = flight
        self.task: asyncio.Task[int] | None = None
        """The exchange, while there is one."""
        self.is_abandoned = False
        """Whether the replica was given up meanwhile."""
        replica.trips.add(self)

    def abandon(self) -> None:
        """Stop waiting for the replica."""
        self.is_abandoned = True
        if self.task is not None:
            self.task.cancel()


class Fleet:
    """All back ends of a router."""

    def __init__(
        self, config: RouteConfig, balancer: Balancer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._balancer = balancer
        self._clock = clock
        self._replicas: dict[str, Replica] = {}

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All of them, in the order in which they were added."""
        return tuple(self._replicas.values())

    @property
    def is_ready(self) -> bool:
        """Whether a request would be sent somewhere that has answered before."""
        return any(
            replica.breaker.has_served
            and not replica.is_draining
            and self.state(replica) is not BreakerState.OPEN
            for replica in self.replicas
        )

    @property
    def num_in_flight(self) -> int:
        """Requests at all back ends."""
        return sum(len(replica.trips) for replica in self.replicas)

    def state(self, replica: Replica) -> BreakerState:
        """Return what a back end's breaker lets pass now."""
        return replica.breaker.state(self._clock())

    def find(self, url: str) -> Replica | None:
        """Return a back end by its URL. Raises ConfigError for what is none."""
        return self._replicas.get(_name(Address.parse(url)))

    def add(self, url: str, *, host_name: str | None = None, source: str | None = None) -> Replica:
        """Add a back end, or take one back that was draining. Raises ConfigError."""
        name = _name(Address.parse(url))
        known = self._replicas.get(name)
        if known is not None:
            known.is_draining = known.is_leaving = False
            return known
        if len(self._replicas) >= MAX_BACKENDS:
            raise ConfigError(f"there are {MAX_BACKENDS} back ends, and no more can be added")
        client = HttpClient(
            url,
            timeout_s=self._config.silence_timeout_s,
            connect_timeout_s=self._config.connect_timeout_s,
            host_name=host_name,
        )
        replica = Replica(name, self._balancer.add(name), client)
        replica.source = source
        self._replicas[name] = replica
        return replica

    def remove(self, replica: Replica) -> None:
        """Send nothing more to a back end, and forget it when its requests have ended, or were
        given the time of a drain."""
        if replica.is_leaving:
            return
        replica.is_draining = replica.is_leaving = True
        if not replica.trips:
            self._forget(replica)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self._config.drain_timeout, self._end_leaving, replica)

    def memory(self, replica: Replica) -> ObservedMemory | None:
        """Return what is known of a back end's cache; None where it was forgotten."""
        return self._balancer.memory(replica.name)

    def send(self, ask: Ask, model: str | None, tried: set[str]) -> Trip | None:
        """Choose a back end that is not in `tried`, and account for the request. None where none
        can take it now."""
        able = self._able(model, tried)
        if not able:
            return None
        flight, num_cached = self._balancer.send(ask, [replica.load for replica in able])
        replica = self._replicas[flight.load.name]
        replica.breaker.send(self._clock())
        replica.num_prompt_tokens += ask.num_prompt_tokens
        replica.num_cached_tokens += num_cached
        return Trip(replica, flight)

    def end(self, trip: Trip, outcome: str) -> None:
        """Take a trip out of the accounts; once."""
        replica = trip.replica
        trip.flight.end()
        replica.trips.discard(trip)
        replica.num_by_outcome[outcome] = replica.num_by_outcome.get(outcome, 0) + 1
        if replica.is_leaving and not replica.trips:
            self._forget(replica)

    def fail(self, replica: Replica, *, is_certain: bool = False) -> None:
        """Note that a back end failed a request."""
        if replica.breaker.fail(self._clock(), is_certain=is_certain):
            logger.warning("back end %s is down", replica.name)
            self._balancer.forget(replica.name)
            replica.models = None

    def give_up(self, replica: Replica) -> None:
        """Note that a back end is dead or stuck: nothing waits for it any longer."""
        self.fail(replica, is_certain=True)
        for trip in tuple(replica.trips):
            trip.abandon()

    def note_probe(self, replica: Replica) -> None:
        """Note that a probe was answered: the first one closes the breaker, later ones let a
        request try."""
        if replica.breaker.has_served:
            replica.breaker.retry(self._clock())
        else:
            replica.breaker.succeed()

    def close(self) -> None:
        """Close all connections."""
        for replica in self.replicas:
            for trip in tuple(replica.trips):
                trip.abandon()
            replica.client.close()

    def _able(self, model: str | None, tried: set[str]) -> list[Replica]:
        now = self._clock()
        able = [
            replica
            for replica in self.replicas
            if replica.name not in tried
            and not replica.is_draining
            and replica.breaker.may_send(now)
        ]
        # a name that none of them has told of may be an adapter's, or a mistake: one of them knows
        return [replica for replica in able if replica.serves(model)] or able

    def none_left(self) -> ApiError:
        """Return what a client is told where no back end can take its request."""
        now = self._clock()
        waits_s = [
            replica.breaker.wait_s(now) for replica in self.replicas if not replica.is_draining
        ]
        return overloaded(
            "no back end can take requests now",
            code="no_backend",
            retry_after_s=min(waits_s, default=_RETRY_S),
            status=503,
        )

    def _end_leaving(self, replica: Replica) -> None:
        if replica.is_leaving:
            for trip in tuple(replica.trips):
                trip.abandon()

    def _forget(self, replica: Replica) -> None:
        if self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]
            self._balancer.remove(replica.name)
            replica.client.close()


def _name(address: Address) -> str:
    scheme = "https" if address.is_secure else "http"
    return f"{scheme}://{address.netloc}{address.path}"
