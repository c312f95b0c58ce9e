"""Which replica gets a request: the policies of `quire route`, as a request router of Ray Serve.

Runs in each ingress, which knows what it has sent where: beginnings of prompts, and requests in
flight. Several ingresses agree by hashes, without talking.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from quire.router.asks import AskReader
from quire.routing.ask import Ask
from quire.routing.choices import make_balancer
from quire.routing.load import LoadShare, ReplicaLoad

_MAX_EARLY = 1024
"""Ends come within one turn of the event loop of what they belong to."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by a policy of `quire.routing`, for the handle of one process."""

    def initialize_state(
        self,
        policy: str = "kv-aware",
        chunk_bytes: int = 512,
        session_header: str = "x-session-id",
    ) -> None:
        """Called once, with what `RequestRouterConfig` has."""
        self._reader = AskReader(chunk_bytes, session_header)
        self._balancer = make_balancer(policy)
        self._loads: dict[str, ReplicaLoad] = {}
        self._shares: dict[tuple[str, str], LoadShare] = {}
        """Of requests that are at a replica, by Serve's own numbers and that replica."""
        self._counting = threading.Lock()
        self._early: OrderedDict[str, str] = OrderedDict()
        """Requests whose end at a replica was heard of before they counted there: a short answer's,
        or that of an attempt which the replica refused."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget those that are gone."""
        super().update_replicas(replicas)
        names = {each.replica_id.unique_id for each in replicas}
        for name in set(self._loads) - names:
            self._balancer.remove(name)
            del self._loads[name]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the policy's choice, and all others for the case that it takes no more."""
        if not candidate_replicas:
            return []
        if pending_request is not None:  # another attempt
            with self._counting:
                self._early.pop(pending_request.metadata.internal_request_id, None)
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = [self._load(name) for name in by_name]
        # it counts once it is there, and may be offered elsewhere until then
        chosen = by_name.pop(self._balancer.choose(self._ask(pending_request), loads).name)
        return [[chosen], list(by_name.values())] if by_name else [[chosen]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Count a request where it is now."""
        number, name = pending_request.metadata.internal_request_id, replica_id.unique_id
        ask = self._ask(pending_request)
        with self._counting:
            share, _ = self._balancer.account(ask, self._load(name))
            if self._early.pop(number, None) == name:
                share.end()
            else:
                self._shares[number, name] = share

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take it out again, however it has ended. Serve may call this in a thread of Ray's."""
        name = replica_id.unique_id
        with self._counting:
            share = self._shares.pop((internal_request_id, name), None)
            if share is not None:
                share.end()
                return
            self._early[internal_request_id] = name
            if len(self._early) > _MAX_EARLY:
                self._early.popitem(last=False)

    def _load(self, name: str) -> ReplicaLoad:
        if name not in self._loads:
            self._loads[name] = self._balancer.add(name)
        return self._loads[name]

    def _ask(self, pending_request: PendingRequest | None) -> Ask:
        request: Any = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(request, dict):
            return Ask()
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in request["headers"]
        }
        return self._reader.read(headers, request["body"], headers.get("authorization", "")).ask
