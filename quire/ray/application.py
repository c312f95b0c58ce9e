"""The deployments of an application: replicas, and the ingress in front of them."""

from __future__ import annotations

from typing import Any

from quire.common.extras import needs_extra
from quire.errors import ConfigError
from quire.ray.autoscaling import WaitingTokens
from quire.ray.settings import DEFAULT_TARGET_TOKENS, RaySettings

with needs_extra("quire.ray", "ray,serve"):
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from quire.ray.ingress import Ingress
    from quire.ray.replica import EngineReplica

_AUTOSCALING = (
    "min_replicas", "max_replicas", "initial_replicas", "upscale_delay_s", "downscale_delay_s",
    "target_ongoing_requests", "metrics_interval_s", "look_back_period_s",
)  # fmt: skip
_RESOURCES = ("num_gpus", "resources")
_MAX_ONGOING = 256
"""Of a replica: its engine has a queue of its own, which is what autoscaling looks at."""


def application(settings: RaySettings) -> serve.Application:
    """Return what `serve.run` takes. Raises ConfigError for numbers that Serve does not take."""
    try:
        replicas = serve.deployment(EngineReplica).options(**_replica_options(settings))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"replicas: Ray Serve does not take this: {error}") from None
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress", num_replicas=settings.num_ingresses, max_ongoing_requests=1024,
        ray_actor_options={"num_cpus": 0},
    )  # fmt: skip
    return ingress.bind(replicas.bind(settings), settings.api_config)


def _replica_options(settings: RaySettings) -> dict[str, Any]:
    given, config = settings.replicas, settings.engine_config()
    cpus = {"num_cpus": config.num_threads or 1}
    actor: dict[str, Any] = {name: given[name] for name in _RESOURCES if name in given}
    options: dict[str, Any] = {
        "name": "EngineReplica",
        "ray_actor_options": actor | cpus,
        "max_ongoing_requests": given.get("max_ongoing_requests", _MAX_ONGOING),
        "request_router_config": RequestRouterConfig(
            request_router_class="quire.ray.prefix_router:PrefixRouter",
            request_router_kwargs=dict(settings.routing),
        ),
    }
    if config.num_processes > 1:
        # The replica's actor is in the first bundle, its engine's other processes in the others.
        each = {"CPU": cpus["num_cpus"]}
        first = {**each, **actor.get("resources", {})}
        if "num_gpus" in actor:
            first["GPU"] = actor["num_gpus"]
        options["placement_group_bundles"] = [first, *[each] * (config.num_processes - 1)]
        options["placement_group_strategy"] = given.get("placement_group_strategy", "PACK")
    if "num_replicas" in given:
        options["num_replicas"] = given["num_replicas"]
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            **{name: given[name] for name in _AUTOSCALING if name in given},
            policy=AutoscalingPolicy(
                policy_function=WaitingTokens,
                policy_kwargs={
                    "target_tokens": given.get("target_waiting_tokens", DEFAULT_TARGET_TOKENS)
                },
            ),
        )
    return options
