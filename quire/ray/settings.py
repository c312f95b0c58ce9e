"""What an application is to be like, as plain values: they come from YAML and go to other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quire.config.api import ApiConfig
from quire.config.engine import EngineConfig
from quire.config.processes import SSL
from quire.errors import ConfigError
from quire.routing.choices import POLICIES

DEFAULT_TARGET_TOKENS = 2048
"""Prompt tokens that may wait at a replica: a step or two of the usual size."""
_REPLICA_KEYS = (
    "num_replicas", "min_replicas", "max_replicas", "initial_replicas", "max_ongoing_requests",
    "upscale_delay_s", "downscale_delay_s", "target_waiting_tokens", "target_ongoing_requests",
    "metrics_interval_s", "look_back_period_s", "placement_group_strategy", "num_gpus", "resources",
)  # fmt: skip
_SCALING_KEYS = frozenset(
    {
        "min_replicas", "max_replicas", "initial_replicas", "upscale_delay_s", "downscale_delay_s",
        "target_waiting_tokens", "target_ongoing_requests", "metrics_interval_s",
        "look_back_period_s",
    }
)  # fmt: skip
"""Of these, what means nothing where the number is fixed."""
_ROUTING_KEYS = ("policy", "chunk_bytes", "session_header")


@dataclass(frozen=True)
class RaySettings:
    """The arguments of `build_app`."""

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine, by the names that `LLM` takes. `num_threads` is 1 unless given, and
    what is reserved of Ray's CPUs."""
    api: Mapping[str, Any] = field(default_factory=dict)
    """Options of the API, by the names of `quire serve`."""
    replicas: Mapping[str, Any] = field(default_factory=dict)
    """How many, and when there are to be more."""
    routing: Mapping[str, Any] = field(default_factory=dict)
    """`policy` (of `quire route`), `chunk_bytes`, `session_header`."""
    num_ingresses: int = 1

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> RaySettings:
        """Make settings of what is given. Raises ConfigError for what is unknown or wrong, here and
        not on a node."""
        if not isinstance(args, Mapping):
            raise ConfigError(f"build_app needs a mapping of arguments, not {args!r:.80}")
        if not args.get("model"):
            raise ConfigError("build_app needs a model: the name or folder of one, as model=...")
        _check_keys("build_app", args, [each.name for each in fields(cls)])
        settings = cls(**args)
        for name in ("engine", "api", "replicas", "routing"):
            if not isinstance(getattr(settings, name), Mapping):
                raise ConfigError(
                    f"{name}={getattr(settings, name)!r} must be a mapping of options"
                )
        _check_keys("replicas", settings.replicas, _REPLICA_KEYS)
        scaling = sorted(_SCALING_KEYS & settings.replicas.keys())
        if "num_replicas" in settings.replicas and scaling:
            raise ConfigError(
                f"replicas: {', '.join(scaling)} say how the number of replicas follows the load, "
                f"and num_replicas={settings.replicas['num_replicas']!r} fixes it; give one or the "
                "other"
            )
        _check_keys("routing", settings.routing, _ROUTING_KEYS)
        if settings.policy not in POLICIES:
            raise ConfigError(
                f"there is no routing policy {settings.policy!r}; choose one of "
                f"{', '.join(POLICIES)}"
            )
        _check_positive("num_ingresses", settings.num_ingresses, is_whole=True)
        _check_positive("chunk_bytes", settings.routing.get("chunk_bytes", 1), is_whole=True)
        _check_positive("target_waiting_tokens", settings.replicas.get("target_waiting_tokens", 1))
        if not isinstance(header := settings.routing.get("session_header", ""), str):
            raise ConfigError(f"session_header={header!r} must be the name of a header")
        _check_keys("api", settings.api, [each.name for each in fields(ApiConfig)])
        ApiConfig(**settings.api)
        config = settings.engine_config()
        if config.num_processes > 1 and config.distributed_executor_backend not in ("ray", None):
            raise ConfigError(
                f"distributed_executor_backend={config.distributed_executor_backend!r}: the "
                "processes of a replica are placed by Ray here; leave it out"
            )
        if config.num_processes == 1 and "placement_group_strategy" in settings.replicas:
            raise ConfigError(
                "replicas: placement_group_strategy has no effect, as a replica is one process; "
                "give tensor_parallel_size, or leave it out"
            )
        return settings

    def engine_config(self, **more: Any) -> EngineConfig:
        """Return the engine's options. Raises ConfigError."""
        options = {"num_threads": 1, **self.engine}
        alone = {name: each for name, each in options.items() if name != SSL}
        config = EngineConfig.from_options(self.model, alone)
        if config.num_processes > 1 and config.distributed_executor_backend is None:
            options["distributed_executor_backend"] = "ray"
        return EngineConfig.from_options(self.model, options | more)

    @property
    def policy(self) -> str:
        """How a replica is chosen."""
        return str(self.routing.get("policy", "kv-aware"))

    @property
    def api_config(self) -> ApiConfig:
        """The API's options. Raises ConfigError."""
        return ApiConfig(**self.api)


def _check_keys(what: str, given: Mapping[str, Any], known: Any) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{what}: unknown key {name!r}; known are {', '.join(known)}")


def _check_positive(name: str, value: Any, *, is_whole: bool = False) -> None:
    kinds: Any = int if is_whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < float("inf"):
        kind = "a whole number of at least 1" if is_whole else "a number above 0"
        raise ConfigError(f"{name}={value!r} must be {kind}")
