"""Ranks as actors of a Ray cluster: Ray says on which node each runs, starts it there, and ends it.

An actor holds a rank's process, the same that a rank of one host has, and answers for it. What
ranks exchange goes over connections of their own, not through Ray, and so a death is noticed by
these, in the time that `distributed_timeout_seconds` allows. The first process is the one that
builds the engine: a driver, or an actor in whose placement group the others then are. Only text
goes to actors and comes back; the package must be installed on their nodes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.common.extras import needs_extra
from quire.errors import CapacityError, ConfigError, EngineError, QuireError
from quire.parallel.processes import LocalPlaces

with needs_extra("distributed_executor_backend='ray'", "ray"):
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)

PLACING_TIMEOUT_S = 60.0
"""For a cluster to have room, and to start an actor there."""
BY_ID = "id:"
"""Before the hexadecimal id of a placement group, where others have its name."""
_STOP_TIMEOUT_S = 5.0
_REACH_TIMEOUT_S = 10.0
_LOOK_INTERVAL_S = 0.05
_RETRY_INTERVAL_S = 0.5


class RankActor:
    """Runs in a worker of Ray's, and holds one rank's process there."""

    def __init__(self, arguments: str, start: str) -> None:
        """`arguments` of Python and `start`, both JSON, are what `RankProcess` takes."""
        command = (sys.executable, *json.loads(arguments))
        places = LocalPlaces(command, ray.util.get_node_ip_address())
        self._process = places.start(json.loads(start), ())

    def pid(self) -> int:
        """Return the process's number on this node."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> str:
        """Return what `RankHandle.wait_ready` would raise, and whether it is the user's mistake;
        empty once the rank is ready."""
        try:
            self._process.wait_ready(time.monotonic() + timeout_s)
        except QuireError as error:
            return json.dumps({"error": str(error), "is_config": isinstance(error, ConfigError)})
        return ""

    def stop(self) -> None:
        """End the process, frozen or not."""
        self._process.kill()


class RayRank:
    """The engine's end of an actor. Implements `RankHandle`."""

    def __init__(self, create: Callable[[], Any], load_timeout_s: float) -> None:
        """`create` makes the actor: again, where Ray has tried it on a node that is gone and not
        known to be, as it does for some seconds after a loss."""
        self._create, self._load_timeout_s = create, load_timeout_s
        self._pid, self._is_ready = 0, False
        self._placed_by_s = time.monotonic() + PLACING_TIMEOUT_S
        self._begin()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def has_ended(self) -> bool:
        return False  # its connections say so

    def look(self) -> bool:
        """See `RankHandle.look`. Where the cluster has no room for it in time, EngineError, too."""
        if not self._pid:
            self._look_for_place()
        if not self._pid and time.monotonic() > self._placed_by_s:
            raise EngineError(
                f"Ray has not started a rank after {PLACING_TIMEOUT_S:g} s; is there still a node "
                "with room for it? (ray status)"
            )
        if (
            self._pid
            and not self._is_ready
            and (answer := self._answer(self._ready_answer)) is not None
        ):
            if answer:
                found = json.loads(answer)
                raise (ConfigError if found["is_config"] else EngineError)(found["error"])
            self._is_ready = True
        return self._is_ready and self._pid != 0

    def wait_ready(self, deadline_s: float) -> None:
        """See `RankHandle.wait_ready`."""
        while not self.look():
            if time.monotonic() > deadline_s:
                raise EngineError(f"a rank is not loaded in time (process {self._pid} of its node)")
            time.sleep(_LOOK_INTERVAL_S)

    def kill(self) -> None:
        """See `RankHandle.kill`."""
        with contextlib.suppress(Exception):  # the actor, or its whole node, may be gone
            ray.get(self._actor.stop.remote(), timeout=_STOP_TIMEOUT_S)
        with contextlib.suppress(Exception):
            ray.kill(self._actor, no_restart=True)

    def _begin(self) -> None:
        self._began_s = time.monotonic()
        self._actor = actor = self._create()
        self._pid_answer = actor.pid.remote()
        self._ready_answer = actor.wait_ready.remote(self._load_timeout_s)

    def _look_for_place(self) -> None:
        try:
            self._pid = int(self._answer(self._pid_answer) or 0)
        except EngineError:
            now_s = time.monotonic()
            if self._began_s + _RETRY_INTERVAL_S < now_s < self._placed_by_s:
                with contextlib.suppress(Exception):
                    ray.kill(self._actor, no_restart=True)
                self._begin()

    def _answer(self, reference: Any) -> Any:
        """Return what the actor has answered; None where it has not yet."""
        ready, _ = ray.wait([reference], timeout=0)
        if not ready:
            return None
        try:
            return ray.get(reference, timeout=_STOP_TIMEOUT_S)
        except Exception as error:
            reason = type(error).__name__
            raise EngineError(f"Ray has lost a rank while it was loading ({reason})") from None


class RayPlaces:
    """Bundles of a placement group: the one that `group_name` names, else the one that this process
    runs in, else one of its own. Implements `RankPlaces`."""

    host: str | None

    def __init__(
        self, command: Sequence[str], num_ranks: int, num_cpus: int, group_name: str | None
    ) -> None:
        """For the ranks but the first of `num_ranks`, each with so many of Ray's CPUs. Raises
        ConfigError where there is no cluster, or no such group."""
        self._arguments = json.dumps(list(command[1:]))
        self._num_others, self._num_cpus = num_ranks - 1, num_cpus
        self._group_name = group_name
        self._group: PlacementGroup | None = None
        self._is_own = False
        self._bundles: list[int] = []
        _connect()
        self.host = ray.util.get_node_ip_address()
        self._actor = ray.remote(max_concurrency=4, max_restarts=0, num_gpus=0)(RankActor)

    def start(self, start: Mapping[str, Any], filenos: Sequence[int]) -> RayRank:
        if self._group is None:
            self._take_group()
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._bundles[start["rank"] - 1]
        )
        try:
            options = self._actor.options(num_cpus=self._num_cpus, scheduling_strategy=strategy)
            create = partial(options.remote, self._arguments, json.dumps(dict(start)))
            return RayRank(create, start["load_timeout_s"])
        except (ray.exceptions.RayError, ValueError) as error:
            raise EngineError(f"Ray cannot start a rank: {type(error).__name__}") from error

    def settle(self) -> None:
        """See `RankPlaces.settle`: each actor has a process of its own, and ends with its rank."""

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self._is_own:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(group)

    def _take_group(self) -> None:
        group = _given_group(self._group_name)
        if group is None:
            group = ray.util.placement_group(
                [{"CPU": float(self._num_cpus)}] * self._num_others, strategy="SPREAD"
            )
            self._is_own = True
        self._group = group
        if not group.wait(PLACING_TIMEOUT_S):
            self.close()
            raise CapacityError(
                f"the Ray cluster has no room for {self._num_others} ranks of {self._num_cpus} CPUs"
                f" each besides the first process: {ray.cluster_resources().get('CPU', 0):g} CPUs "
                "in all; add nodes, or give a lower num_threads"
            )
        sizes = placement_group_table(group)["bundles"]
        own = -1 if self._is_own else _own_bundle(group)
        if own < 0 and len(sizes) > self._num_others:
            own = 0  # where there is one for each process, the first is for the first
        self._bundles = [
            number
            for number, size in sorted(sizes.items())
            if number != own and size.get("CPU", 0.0) >= self._num_cpus
        ]
        if len(self._bundles) < self._num_others:
            self.close()
            raise CapacityError(
                f"the placement group has {len(self._bundles)} bundles of {self._num_cpus} CPUs or "
                f"more besides that of the first process, and {self._num_others} ranks need one "
                "each; add bundles, or give a lower num_threads"
            )


def _connect() -> None:
    """Use the cluster that this process belongs to, or that RAY_ADDRESS or this host's own `ray
    start` names. None is started here: it would be one of this host alone."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        host, _, port = address.rpartition(":")
        if "://" not in address and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            "distributed_executor_backend='ray' needs a running Ray cluster: start one with `ray "
            f"start --head`, or set RAY_ADDRESS ({reason})"
        ) from None


def _given_group(name: str | None) -> PlacementGroup | None:
    """Return the group of this name, or the current one. Raises ConfigError where there is none of
    this name."""
    if name is None:
        found: PlacementGroup | None = ray.util.get_current_placement_group()
        return found
    try:
        if name.startswith(BY_ID):  # that of another job, whose names are not this one's
            return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name.removeprefix(BY_ID))))
        return ray.util.get_placement_group(name)
    except ValueError:
        raise ConfigError(
            f"ray_placement_group={name!r} is not in this cluster and namespace; create it with "
            "ray.util.placement_group(..., name=...), or leave the option out"
        ) from None


def _own_bundle(group: PlacementGroup) -> int:
    """Return which bundle of the group this process runs in; -1 for none, or where it holds nothing
    of one."""
    if ray.util.get_current_placement_group() != group:
        return -1
    # The published names of an actor's resources are without their bundles.
    for name in ray.get_runtime_context().worker.core_worker.resource_ids():
        found = re.fullmatch(rf"\w+?_group_(\d+)_{group.id.hex()}", name)
        if found is not None:
            return int(found[1])
    return -1
