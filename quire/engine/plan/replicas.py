"""What each of several replicas may take of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.config.engine import EngineConfig
from quire.engine.plan.machine import Machine
from quire.errors import ConfigError


def share_of(machine: Machine, config: EngineConfig) -> Machine:
    """Return the part of a machine that one replica has: an equal share of cores and memory.
    Raises ConfigError on a GPU."""
    count = config.data_parallel_size
    if count == 1:
        return machine
    if config.device == "cuda":
        raise ConfigError(
            f"data_parallel_size={count} is for the CPU: start a server for each GPU, and "
            "quire route in front of them"
        )
    return replace(
        machine,
        available_memory=machine.available_memory // count,
        memory_reason=f"of each replica, a share of the {machine.memory_reason}",
        num_cores=max(1, machine.num_cores // count),
        cores_reason=f"of each replica: {machine.num_cores} {machine.cores_reason}, divided by "
        f"{count}",
    )


def decisions(config: EngineConfig) -> Iterator[tuple[str, int, str]]:
    """Give what `quire plan` says of replicas, where there are several."""
    if config.data_parallel_size > 1:
        reason = "given; each is an engine in a process of its own, with all of the weights"
        yield "data_parallel_size", config.data_parallel_size, reason
