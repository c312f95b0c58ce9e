"""What operators and load balancers ask: is it alive, is it ready, how loaded, who used what."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import quire
from quire.engine.front.status import EngineStatus
from quire.server.http.call import call_of
from quire.server.http.errors import overloaded
from quire.server.http.responses import json_response
from quire.server.ops.metrics import CONTENT_TYPE
from quire.server.state import Api

_RETRY_WHEN_NOT_READY_S = 5


def of_replicas(status: EngineStatus) -> list[dict[str, Any]]:
    """Return how each of several engines is doing; nothing of one alone."""
    return [
        {
            "state": each.state,
            "num_requests": each.num_requests,
            "num_running": each.num_running,
            "num_waiting": each.num_waiting,
            "kv_usage": each.kv_usage,
            "num_steps": each.num_steps,
            "last_step_age_s": each.last_step_age_s,
            "num_restarts": each.num_restarts,
        }
        for each in status.replicas
    ]


class Operations:
    """The endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def live(self, request: Request) -> Response:
        """200 as long as this process answers."""
        return json_response(call_of(request), {"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """200 where a new request would be served now; else 503 and the state."""
        status = self._api.client.status()
        if not status.is_ready:
            raise overloaded(
                f"not ready: {status.state}",
                code=status.state,
                retry_after_s=_RETRY_WHEN_NOT_READY_S,
                status=503,
            )
        return json_response(call_of(request), {"status": "ready"})

    async def progress(self, request: Request) -> Response:
        """Return numbers that show whether the engine makes progress."""
        status = self._api.client.status()
        num_queued, num_queued_tokens = self._api.admission.queue()
        numbers: dict[str, Any] = {
            "state": status.state,
            "reason": status.reason,
            "num_requests": self._api.admission.num_in_flight,
            "num_running": status.num_running,
            "num_waiting": status.num_waiting,
            "num_queued_requests": num_queued,
            "num_queued_prompt_tokens": num_queued_tokens,
            "kv_usage": status.kv_usage,
            "num_steps": status.num_steps,
            "last_step_age_s": status.last_step_age_s,
            "last_sign_of_life_age_s": status.last_sign_of_life_age_s,
            "num_restarts": status.num_restarts,
            "replicas": of_replicas(status),
        }
        return json_response(call_of(request), numbers)

    async def load(self, request: Request) -> Response:
        """Return requests in flight, in vLLM's form."""
        return json_response(call_of(request), {"server_load": self._api.admission.num_in_flight})

    async def version(self, request: Request) -> Response:
        """Return the version of the server."""
        answer = {"version": quire.__version__}
        if (platform := self._api.client.model.platform) is not None:
            answer["platform"] = platform
        return json_response(call_of(request), answer)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(
            self._api.metrics.exposition(),
            headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"},
        )

    async def usage(self, request: Request) -> Response:
        """Return what the asking tenant has used since the server started, and what it may."""
        tenant = call_of(request).tenant
        use = self._api.admission.uses[tenant.name]
        body = {
            "object": "usage",
            "tenant": tenant.name,
            "requests": use.num_requests,
            "refused_requests": use.num_refused,
            "in_flight": use.num_in_flight,
            "prompt_tokens": use.num_prompt_tokens,
            "cached_tokens": use.num_cached_tokens,
            "cache_write_tokens": use.num_cache_write_tokens,
            "completion_tokens": use.num_output_tokens,
            "limits": {
                "weight": tenant.weight,
                "tokens_per_minute": tenant.tokens_per_minute,
                "requests_per_minute": tenant.requests_per_minute,
                "max_concurrency": tenant.max_concurrency,
            },
        }
        return json_response(call_of(request), body)
