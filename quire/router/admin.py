"""What operators ask of the router itself, and what it says about all back ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import quire
from quire.common.http_client import HttpError, HttpRequest, HttpResponse
from quire.errors import ConfigError
from quire.router.fleet import Fleet, Replica
from quire.router.metrics import RouterMetrics
from quire.router.prober import Prober
from quire.server.http.body import read_json
from quire.server.http.call import call_of
from quire.server.http.errors import ApiError, bad_request, overloaded
from quire.server.http.responses import json_response
from quire.server.ops.metrics import CONTENT_TYPE
from quire.server.quota.tenants import EVERYBODY

_LIST_TIMEOUT_S = 10.0


class BackendRequest(msgspec.Struct):
    """Body of the calls that name a back end."""

    url: str


class RouterRoutes:
    """The endpoints."""

    def __init__(
        self,
        fleet: Fleet,
        prober: Prober,
        metrics: RouterMetrics,
        *,
        is_guarded: bool,
        end: Callable[[], None],
    ) -> None:
        """`is_guarded` where either a key or being on this machine is needed to get here; `end`
        begins the end of this router."""
        self._fleet = fleet
        self._prober = prober
        self._metrics = metrics
        self._is_guarded = is_guarded
        self._end = end
        self.backend_headers: Callable[[Request], Mapping[str, str]] = lambda request: {}
        self.is_draining = False

    async def live(self, request: Request) -> Response:
        """200 as long as this process answers."""
        return json_response(call_of(request), {"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """200 where a request would be sent to a back end now; else 503."""
        if self.is_draining or not self._fleet.is_ready:
            state = "draining" if self.is_draining else "no_backend"
            raise overloaded(f"not ready: {state}", code=state, retry_after_s=5, status=503)
        return json_response(call_of(request), {"status": "ready"})

    async def version(self, request: Request) -> Response:
        """Return the version of the router."""
        return json_response(call_of(request), {"version": quire.__version__})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(
            self._metrics.exposition(),
            headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"},
        )

    async def models(self, request: Request) -> Response:
        """Return the models of all back ends, each once, in the words of the first that has it."""
        headers = self.backend_headers(request)
        replicas = [each for each in self._fleet.replicas if not each.is_draining]
        lists = await asyncio.gather(*(_models_of(replica, headers) for replica in replicas))
        answered = [models for models in lists if models is not None]
        if not answered:
            raise self._fleet.none_left()
        merged: dict[str, Any] = {}
        for models in answered:
            for model in models:
                merged.setdefault(str(model["id"]), model)
        return json_response(call_of(request), {"object": "list", "data": list(merged.values())})

    async def backends(self, request: Request) -> Response:
        """Return all back ends with their state and load."""
        self._check_admin(request)
        shown = [self._shown(replica) for replica in self._fleet.replicas]
        return json_response(call_of(request), {"object": "list", "data": shown})

    async def add(self, request: Request) -> Response:
        """Add a back end, or a name that stands for several; one that was draining is taken
        back."""
        url = await self._url(request)
        try:
            self._prober.add(url)
        except ConfigError as error:
            raise bad_request(str(error), param="url", code="invalid_value") from None
        await asyncio.gather(self._prober.resolve_all(), self._prober.probe_all())
        return await self.backends(request)

    async def remove(self, request: Request) -> Response:
        """Send a back end (`?url=`) nothing more; it is forgotten when its requests have ended."""
        self._check_admin(request)
        url = request.query_params.get("url", "")
        try:
            is_known = self._prober.remove(url)
        except ConfigError as error:
            raise bad_request(str(error), param="url", code="invalid_value") from None
        if not is_known:
            raise ApiError(404, f"there is no back end {url[:200]!r}", param="url")
        return await self.backends(request)

    async def drain_backend(self, request: Request) -> Response:
        """Send a back end nothing more, and keep it; adding it again takes it back."""
        url = await self._url(request)
        try:
            replica = self._fleet.find(url)
        except ConfigError as error:
            raise bad_request(str(error), param="url", code="invalid_value") from None
        if replica is None:
            raise ApiError(404, f"there is no back end {url[:200]!r}", param="url")
        replica.is_draining = True
        return await self.backends(request)

    async def drain(self, request: Request) -> Response:
        """Begin the end of this router, as SIGTERM does."""
        self._check_admin(request)
        self._end()
        return json_response(call_of(request), {"status": "draining"})

    async def broadcast(self, request: Request) -> Response:
        """Send a request to every back end at once, for what all of them must do alike. Where some
        do not, the answer says which is the first of them, and why. What they serve may have
        changed, and is known anew when the caller hears of it."""
        self._check_admin(request)
        body = await request.body()
        asked = HttpRequest(
            "POST",
            request.url.path,
            body,
            {"content-type": "application/json", **self.backend_headers(request)},
        )
        replicas = tuple(self._fleet.replicas)
        if not replicas:
            raise self._fleet.none_left()
        answers = await asyncio.gather(*(_answer_of(replica, asked) for replica in replicas))
        await self._prober.learn_again(replicas, self.backend_headers(request))
        refusals = [
            (replica, answer)
            for replica, answer in zip(replicas, answers, strict=True)
            if answer.status >= 300
        ]
        if not refusals:
            return Response(answers[0].body, media_type="application/json")
        replica, answer = refusals[0]
        error = _error_in(answer.body)
        raise ApiError(
            answer.status,
            f"{len(refusals)} of {len(replicas)} back ends refused, {replica.name}: "
            f"{error.get('message', 'no reason is given')}",
            param=error.get("param"),
            code=error.get("code"),
        )

    def _shown(self, replica: Replica) -> dict[str, Any]:
        models = replica.models
        return {
            "url": replica.name,
            "source": replica.source,
            "state": self._fleet.state(replica).value,
            "is_draining": replica.is_draining,
            "requests_in_flight": replica.load.num_requests,
            "tokens_in_flight": round(replica.load.tokens),
            "requests": dict(replica.num_by_outcome),
            "models": None if models is None else sorted(models),
        }

    def _check_admin(self, request: Request) -> None:
        """Raises ApiError 403 for a tenant that is no operator, and for everyone where the router
        can be reached from elsewhere and has no keys. Pages in a browser on this machine, which can
        send to any address, are told by their origin; where there are keys they have none."""
        tenant = call_of(request).tenant
        if tenant is EVERYBODY and "origin" in request.headers:
            raise ApiError(
                403, "pages may make no admin calls where there are no keys", code="admin_needed"
            )
        if not (self._is_guarded and tenant.is_admin):
            raise ApiError(
                403,
                "this needs the key of a tenant with admin = true",
                code="admin_needed",
            )

    async def _url(self, request: Request) -> str:
        self._check_admin(request)
        return (await read_json(request, BackendRequest, is_strict=True)).url


async def _answer_of(replica: Replica, asked: HttpRequest) -> HttpResponse:
    """Return a back end's answer; one that gives none has failed."""
    try:
        return await replica.client.request(asked)
    except HttpError as error:
        reason = {"error": {"message": str(error), "code": "backend_failed"}}
        return HttpResponse(502, {}, msgspec.json.encode(reason))


def _error_in(body: bytes) -> dict[str, str]:
    """Return what a refusal says; nothing where it has another form."""
    try:
        error = msgspec.json.decode(body)["error"]
        return {name: text for name, text in error.items() if isinstance(text, str)}
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return {}


async def _models_of(replica: Replica, headers: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Return a back end's list, or None where it gives none."""
    asked = HttpRequest("GET", "/v1/models", headers=headers)
    try:
        async with asyncio.timeout(_LIST_TIMEOUT_S):
            answer = await replica.client.request(asked)
    except (HttpError, TimeoutError):
        return None
    try:
        data = msgspec.json.decode(answer.body)["data"]
        return [model for model in data if isinstance(model, dict) and "id" in model]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None
