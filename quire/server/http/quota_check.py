"""Refusal of requests that could not be served, before any work is done for them; a burst of
requests begins one per round of the event loop.

Reading a body and tokenizing it costs many times what a refusal costs, so under overload requests
that are prepared in vain would take the machine from those that are served. Owns nothing but the
start limiter. Answers to tenants with rates say what is left of them, as OpenAI's do.
"""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.types import Scope

from quire.server.http.start_limiter import StartLimiter
from quire.server.quota.admission import AdmissionControl
from quire.server.quota.tenants import Tenant

GENERATING_PATHS = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
        "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score",
        "/rerank", "/v1/rerank", "/v2/rerank", "/v1/decisions", "/v1/systemone",
        "/invocations", "/v1/cache/warm",
    }
)  # fmt: skip
"""Whose requests take a place in the queue."""


class QuotaCheck:
    """What the gateway asks before it hands a request on."""

    def __init__(self, admission: AdmissionControl) -> None:
        self._admission = admission
        self._start_limiter = StartLimiter()

    @property
    def num_tokens_waiting(self) -> int:
        """Prompt tokens of the requests that wait."""
        return self._admission.queue()[1]

    async def enter(self, scope: Scope, tenant: Tenant) -> None:
        """Let a request in. Raises ApiError."""
        if scope["method"] != "POST":
            return
        is_generating = get_route_path(scope) in GENERATING_PATHS
        if is_generating:
            self._admission.check_room(tenant)
        await self._start_limiter.enter()
        if is_generating:
            self._admission.check_room(tenant)  # others have come in meanwhile

    def headers(self, scope: Scope, tenant: Tenant) -> list[tuple[bytes, bytes]]:
        """Return what an answer says of the tenant's rates; nothing where it has none."""
        if not tenant.has_rates or get_route_path(scope) not in GENERATING_PATHS:
            return []
        rates = self._admission.rate_headers(tenant)
        return [(name.encode(), value.encode()) for name, value in rates.items()]
