"""Requests of batches beside those of clients: when one may be sent, and what becomes of it.

A line is a request like any other: it is admitted on its tenant's account, within its limits, and
has deadlines. It yields to those that came by themselves: it is sent only while few requests wait,
and takes no more than half of what its tenant may have in flight. What is refused for now is put
back rather than held, and its tenant's batches rest. While the engine sleeps none is sent, and one
whose time has run out in its sleep is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from quire.common.failures import log_failure
from quire.server.api.generation import DEADLINE_EXCEEDED
from quire.server.api.openai.batch_results import new_request_id
from quire.server.http.call import Call
from quire.server.http.errors import ApiError, from_exception
from quire.server.quota.tenants import Tenant
from quire.server.quota.turns import Lease, Turns
from quire.server.state import Api

logger = logging.getLogger(__name__)

Runner = Callable[[Call, bytes], Awaitable[dict[str, Any]]]
"""An endpoint without HTTP: a body to its answer."""
MAX_WAITING = 8
"""While more requests than that wait, no line is sent."""
MAX_BYTES = 64 << 20
"""Of bodies of lines in flight, of all batches together."""
_REST_S = 1.0
_MAX_REST_S = 30.0


class LineResult(NamedTuple):
    """How a line was answered."""

    request_id: str
    status: int
    body: dict[str, Any]
    ignored_fields: str | None = None
    """Names of fields of the line's body without effect, as in a header of an answer by HTTP."""


class BatchLines:
    """All lines of one server."""

    def __init__(self, api: Api, runners: Mapping[str, Runner]) -> None:
        self._api = api
        self._runners = runners
        self._turns = Turns(
            api.config.max_batch_lines,
            max_bytes=MAX_BYTES,
            assumed_bytes=api.config.max_body_bytes,
            has_room=self._has_room,
        )

    @property
    def endpoints(self) -> list[str]:
        """What lines can request."""
        return sorted(self._runners)

    @property
    def num_in_flight(self) -> int:
        """Lines that have a turn."""
        return self._turns.held.num_entries

    async def enter(self, tenant: Tenant, timeout_s: float) -> Lease | None:
        """Wait until a line of a tenant may be read and sent;
        None where there was no room in time."""
        return await self._turns.enter(tenant, timeout_s)

    async def run(self, turn: Lease, endpoint: str, body: bytes) -> LineResult | None:
        """Return a line's answer; None where it is to be tried again, later. Gives the turn
        back."""
        config, now_s = self._api.config, time.monotonic()
        slept_s = self._api.client.sleep_clock.total_s
        call = Call(
            new_request_id(),
            turn.tenant,
            deadline_s=now_s + config.request_timeout_s,
            queue_deadline_s=now_s + config.queue_timeout_s,
            is_chat=endpoint != "/v1/completions",
            is_strict=config.strict_fields,
        )
        turn.call = call
        with turn:
            try:
                answered = await self._runners[endpoint](call, body)
                return LineResult(call.request_id, 200, answered, call.shown_ignored_fields())
            except asyncio.CancelledError:
                raise
            except Exception as error:
                answer = from_exception(error)
                if answer.status >= 500 and not isinstance(error, ApiError):
                    log_failure(logger, f"request {call.request_id} of a batch failed", error)
        if answer.status in (429, 503) and answer.headers.get("x-should-retry") != "false":
            wait_s = float(answer.headers.get("retry-after", _REST_S))
            self._turns.rest(turn.tenant, min(_MAX_REST_S, wait_s))
            return None
        if answer.code == DEADLINE_EXCEEDED and self._api.client.sleep_clock.total_s > slept_s:
            return None  # the engine slept meanwhile, which is not the line's fault
        return LineResult(call.request_id, answer.status, answer.body())

    def _has_room(self, tenant: Tenant) -> bool:
        admission, turns = self._api.admission, self._turns
        if self._api.client.status().state == "sleeping":
            return False
        if admission.queue()[0] + turns.num_unadmitted() > MAX_WAITING or not admission.has_room(
            tenant
        ):
            return False
        limit = tenant.max_concurrency
        num_in_flight = admission.uses[tenant.name].num_in_flight + turns.num_unadmitted(
            tenant.name
        )
        return limit is None or num_in_flight < max(1, limit // 2)
