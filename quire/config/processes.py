"""Options that say in how many processes a model is computed, and how these reach one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

from quire.errors import ConfigError

MAX_RANKS = 64
SSL = "distributed_ssl"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSsl:
    """The files of one process's certificate, and of who signed those of the others."""

    ssl_certfile: str
    ssl_keyfile: str
    ssl_ca_file: str

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From a dict or a decoded JSON object. Raises ConfigError."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"{SSL}: unknown key {str(name)[:64]!r}; known are {', '.join(known)}"
                )
        for name in known:
            value = values.get(name)
            if not isinstance(value, str) or not value:
                raise ConfigError(
                    f"{SSL}: {name}={value!r} must be a path: both ends show a certificate, and "
                    "check the other's"
                )
        return cls(**values)

    def absolute(self) -> dict[str, str]:
        """Return the paths as they mean the same in any folder."""
        paths = {item.name: Path(getattr(self, item.name)) for item in fields(self)}
        return {name: str(path.expanduser().absolute()) for name, path in paths.items()}


class ProcessOptions(Protocol):
    """Those of `EngineConfig` that are judged here."""

    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def enable_expert_parallel(self) -> bool: ...
    @property
    def distributed_executor_backend(self) -> str | type | None: ...
    @property
    def executor_class(self) -> type | None: ...
    @property
    def distributed_timeout_seconds(self) -> float: ...
    @property
    def ray_placement_group(self) -> str | None: ...
    @property
    def ssl(self) -> DistributedSsl | None: ...


def check_processes(config: ProcessOptions) -> None:
    """Raise ConfigError for options of processes that are not possible, or not together."""
    num_ranks, timeout = config.tensor_parallel_size, config.distributed_timeout_seconds
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(config, name) > MAX_RANKS:
            raise ConfigError(
                f"{name}={getattr(config, name)} is too many: at most {MAX_RANKS} are possible"
            )
    if config.num_processes > MAX_RANKS:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} times pipeline_parallel_size="
            f"{config.pipeline_parallel_size} are too many processes: at most {MAX_RANKS} are "
            "possible"
        )
    if num_ranks == 1 and config.enable_expert_parallel:
        raise ConfigError(
            "enable_expert_parallel=True divides experts among ranks, and "
            "tensor_parallel_size=1 is one; give 2 or more, or leave it out"
        )
    _check_backend(config)
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not 1.0 <= timeout <= 3600.0:
        raise ConfigError(
            f"distributed_timeout_seconds={timeout!r} must be seconds from 1 to 3600: signs of "
            "life come four times a second"
        )


def _check_backend(config: ProcessOptions) -> None:
    num_ranks, backend = config.tensor_parallel_size, config.distributed_executor_backend
    if config.num_processes > 1 and backend == "uni":
        name = "tensor_parallel_size" if num_ranks > 1 else "pipeline_parallel_size"
        raise ConfigError(
            f"distributed_executor_backend='uni' is one process, and {name}="
            f"{getattr(config, name)} needs more; give 'mp', or leave it out"
        )
    if config.executor_class is not None and config.data_parallel_size > 1:
        raise ConfigError(
            f"distributed_executor_backend={config.executor_class.__name__} is a class of this "
            f"process, and data_parallel_size={config.data_parallel_size} engines are in "
            "processes of their own; leave one of them out"
        )
    is_ray = backend == "ray"
    if is_ray and config.num_processes == 1:
        raise ConfigError(
            "distributed_executor_backend='ray' divides one model among nodes, and "
            "tensor_parallel_size=1 is one process; give 2 or more, or leave it out"
        )
    if config.ray_placement_group is not None and not is_ray:
        raise ConfigError(
            f"ray_placement_group={config.ray_placement_group!r} needs "
            "distributed_executor_backend='ray'"
        )
    if config.ssl is not None and (config.num_processes == 1 or backend in (None, "mp")):
        given = f"distributed_executor_backend={backend or 'mp'!r}"
        if config.num_processes == 1:
            given = "tensor_parallel_size=1"
        raise ConfigError(
            f"{SSL} encrypts what processes of one model send one another, and with {given} they "
            "send nothing; give several and 'ray' or 'sockets', or leave it out"
        )
