"""Refusal of requests that could not be served, before any work is done for them; a burst of
requests begins one per round of the event loop.

Reading a body and tokenizing it costs many times what a refusal costs, so under overload requests
that are prepared in vain would take the machine from those that are served. Owns nothing but the
start limiter. Answers to tenants with rates say what is left of them, as OpenAI's do.
"""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.call import call_in
from quire.server.http.errors import ApiError
from quire.server.http.start_limiter import StartLimiter
from quire.server.quota.admission import AdmissionControl

GENERATING_PATHS = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
        "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score",
        "/rerank", "/v1/rerank", "/v2/rerank", "/v1/decisions", "/v1/systemone",
    }
)  # fmt: skip
"""Whose requests take a place in the queue."""


class QuotaCheck:
    """ASGI middleware around the router."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self._app = app
        self._admission = admission
        self._start_limiter = StartLimiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in. Raises ApiError."""
        if scope["type"] == "http" and scope["method"] == "POST":
            if get_route_path(scope) in GENERATING_PATHS:
                await self._generate(scope, receive, send)
                return
            await self._start_limiter.enter()
        await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = call_in(scope).tenant

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                rates = [
                    (name.encode(), value.encode())
                    for name, value in self._admission.rate_headers(tenant).items()
                ]
                message = {**message, "headers": [*message.get("headers", ()), *rates]}
            await send(message)

        try:
            self._admission.check_room(tenant)
            await self._start_limiter.enter()
            self._admission.check_room(tenant)  # others have come in meanwhile
            await self._app(scope, receive, send_with_rates if tenant.has_rates else send)
        except ApiError as error:
            error.headers.update(self._admission.rate_headers(tenant))
            raise
