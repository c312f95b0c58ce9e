"""The router's application: its own few paths, and everything else to the back ends, behind the
server's gateway."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from quire.common.http_client import key_headers
from quire.config.route import RouteConfig
from quire.errors import ConfigError
from quire.router.admin import RouterRoutes
from quire.router.feed import Feeds
from quire.router.fleet import Fleet
from quire.router.forwarding import SECRETS, Forwarder
from quire.router.metrics import RouterMetrics
from quire.router.paths import BROADCAST_PATHS
from quire.router.prober import Prober
from quire.routing.choices import make_balancer
from quire.server.http.gateway import Gateway
from quire.server.quota.admission import AdmissionControl
from quire.server.quota.tenants import KeyRing


class RouterApp:
    """One router: an ASGI application, and the handles by which its process ends it."""

    def __init__(self, config: RouteConfig, keys: KeyRing, end: Callable[[], None]) -> None:
        """`end` begins the end of the process. Raises ConfigError."""
        balancer = make_balancer(config.policy, config.load_factor, config.memory_chunks)
        self.fleet = Fleet(config, balancer)
        key = key_headers(config.backend_api_key)
        self.prober = Prober(config, self.fleet, key)
        self._feeds = Feeds(config, self.fleet, key)
        for url in config.backend:
            self.prober.add(url)
        api = config.api()
        # Nothing is queued here: what is in flight is with a back end, or about to be.
        self._admission = AdmissionControl(api, keys.tenants, lambda: self.num_in_flight)
        self._metrics = RouterMetrics(self.fleet, self._admission)
        passes_keys = keys.is_open and not key
        self._forwarder = Forwarder(
            config, self.fleet, self._admission, self._metrics, passes_keys=passes_keys
        )
        self._metrics.watch_prefill(lambda: self._forwarder.prefill_outcomes)
        is_guarded = not keys.is_open or is_loopback(config.host)
        self._routes = RouterRoutes(
            self.fleet, self.prober, self._metrics, is_guarded=is_guarded, end=end
        )
        self._routes.backend_headers = lambda request: _own_keys(request) if passes_keys else key
        router = Router(
            _routes(self._routes),
            redirect_slashes=False,
            default=self._forwarder,
            lifespan=self._lifespan,
        )
        self.asgi: ASGIApp = Gateway(router, api, keys, self._metrics)

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return self._admission.num_in_flight

    def drain(self) -> None:
        """Take no new requests."""
        self._forwarder.is_draining = self._routes.is_draining = True

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        self.prober.start()
        self._feeds.start()
        yield
        await self._feeds.close()
        await self.prober.close()
        self._forwarder.close()
        self.fleet.close()


def _routes(own: RouterRoutes) -> list[Route]:
    return [
        Route("/livez", own.live, methods=["GET"]),
        Route("/readyz", own.ready, methods=["GET"]),
        Route("/health", own.ready, methods=["GET"]),
        Route("/ping", own.ready, methods=["GET"]),
        Route("/version", own.version, methods=["GET"]),
        Route("/metrics", own.metrics, methods=["GET"]),
        Route("/v1/models", own.models, methods=["GET"]),
        Route("/admin/backends", own.backends, methods=["GET"]),
        Route("/admin/backends", own.add, methods=["POST"]),
        Route("/admin/backends", own.remove, methods=["DELETE"]),
        Route("/admin/backends/drain", own.drain_backend, methods=["POST"]),
        Route("/admin/drain", own.drain, methods=["POST"]),
        *(Route(path, own.broadcast, methods=["POST"]) for path in sorted(BROADCAST_PATHS)),
    ]


def _own_keys(request: Request) -> Mapping[str, str]:
    return {name: value for name, value in request.headers.items() if name in SECRETS}


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(config: RouteConfig) -> None:
    """Refuse a router without anything behind it. Raises ConfigError."""
    if not config.backend:
        raise ConfigError("no back end is given; say --backend http://host:port, once for each")
