"""Quire as an application of Ray Serve: `serve run quire.ray:build_app model=...`.

Replicas that each are an engine with the server's routes, on the nodes that Ray chooses; in front
of them an ingress that passes requests on to the replica whose cache has most of their beginning
(`quire.routing`); more replicas when prompts wait. Needs `quire-llm[ray,serve]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build_app(args: Mapping[str, Any]) -> Application:
    """Return the application that `args` describe: the keys of `quire.ray.settings.RaySettings`.
    Raises ConfigError."""
    from quire.ray.application import application
    from quire.ray.settings import RaySettings

    return application(RaySettings.of(args))
