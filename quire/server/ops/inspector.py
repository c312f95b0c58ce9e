"""Views of the live engine: its last steps since a cursor, and what a block held in one of
them.

Numbers are for every key. Names of requests and tenants, and texts, are for admin keys, and for
all clients where the server has no keys; others see pseudonyms that are stable while the server
runs. A question costs the engine a moment between two steps, so only so many are put at once.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.config.processes import MAX_RANKS
from quire.engine.front.status import EngineStatus
from quire.engine.loop.inspection import Inspection
from quire.server.http.call import call_of
from quire.server.http.errors import ApiError, overloaded
from quire.server.http.query import MAX_NUMBER, query_of, whole_number
from quire.server.http.responses import json_response
from quire.server.state import Api
from quire.text.tokenizer import Tokenizer

MAX_ASKING = 16
"""Requests that may wait for the engine's answer at once."""
StepNumber = Annotated[int, Meta(ge=-1, le=MAX_NUMBER)]
"""-1 is the one before the first, or the last."""
ReplicaNumber = Annotated[int, Meta(ge=0, le=MAX_RANKS - 1)]


class StepsQuery(msgspec.Struct, kw_only=True):
    """Which steps to return."""

    engine: Annotated[str, Meta(max_length=64)] = ""
    since: StepNumber = -1
    replica: ReplicaNumber = 0
    """Of several engines, which."""


class BlockQuery(msgspec.Struct, kw_only=True):
    """The step in which a block is inspected."""

    step: StepNumber = -1
    replica: ReplicaNumber = 0


class Inspector:
    """The endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._num_asking = 0
        self._disguise_key = secrets.token_bytes(16)

    async def steps(self, request: Request) -> Response:
        """GET /inspect/steps?engine=&since=: the engine's state, and its steps after `since` (all,
        where that is unknown)."""
        call, query = call_of(request), query_of(request, StepsQuery)
        status = self._status_of(query.replica)
        inspection = await self._asked(
            self._api.client.inspect(query.engine, query.since, query.replica)
        )
        body: dict[str, Any] = {
            "model": self._api.model_names[0],
            "state": status.state,
            "reason": status.reason if call.tenant.is_admin else "",
            "num_restarts": status.num_restarts,
            "step_age_s": status.last_step_age_s,
            "num_requests": status.num_requests,
            "replicas": [each.state for each in self._api.client.status().replicas],
            "max_model_len": self._api.client.model.max_model_len,
            "is_admin": call.tenant.is_admin,
            "inspection": inspection
            if call.tenant.is_admin or inspection is None
            else self._disguised(inspection),
        }
        return json_response(call, body)

    async def block(self, request: Request) -> Response:
        """GET /inspect/blocks/{block}?step=: the tokens that a block held in a step,
        with their texts; for admin keys."""
        call = call_of(request)
        if not call.tenant.is_admin:
            raise ApiError(403, "only an admin key may see what blocks hold", code="admin_needed")
        block = whole_number("block", request.path_params["block"], -MAX_NUMBER, MAX_NUMBER)
        query = query_of(request, BlockQuery)
        self._status_of(query.replica)
        content = await self._asked(
            self._api.client.inspect_block(block, query.step, query.replica)
        )
        if content is None:
            raise ApiError(404, "this block or step is not known (any more)", code="unknown_block")
        tokenizer = self._api.client.tokenizer
        texts = None if tokenizer is None else list(texts_of(tokenizer, content.token_ids))
        return json_response(call, {**dataclasses.asdict(content), "texts": texts})

    def _status_of(self, replica: int) -> EngineStatus:
        """Return the status of one engine. Raises ApiError where there are not so many."""
        status = self._api.client.status()
        if replica >= max(1, len(status.replicas)):
            raise ApiError(404, f"there is no replica {replica}", code="unknown_replica")
        return status.replicas[replica] if status.replicas else status

    async def _asked(self, answer: Any) -> Any:
        if self._num_asking >= MAX_ASKING:
            answer.close()
            raise overloaded(
                "too many are looking at the engine at once",
                code="too_many_inspections",
                retry_after_s=1,
            )
        self._num_asking += 1
        try:
            return await answer
        finally:
            self._num_asking -= 1

    def _disguised(self, inspection: Inspection) -> Inspection:
        """Return the same without the names of requests and tenants, and without reasons that hold
        some."""
        replace = dataclasses.replace
        base = inspection.base
        if base is not None:
            base = replace(
                base, rows=tuple(replace(row, name=self._alias(row.name)) for row in base.rows)
            )
        steps = tuple(
            replace(
                step,
                entered=tuple(
                    replace(row, name=self._alias(row.name), tenant="") for row in step.entered
                ),
                waits_for=_without_names(step.waits_for),
            )
            for step in inspection.steps
        )
        requests = tuple(
            replace(
                each,
                name=self._alias(each.name),
                tenant="",
                waits_for=_without_names(each.waits_for),
            )
            for each in inspection.requests
        )
        return replace(inspection, base=base, steps=steps, requests=requests)

    def _alias(self, name: str) -> str:
        digest = hashlib.blake2b(name.encode(), key=self._disguise_key, digest_size=4)
        return f"request-{digest.hexdigest()}"


def texts_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Iterator[str]:
    """Yield what each token adds to the text; a character that is made of several tokens' bytes
    belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token_id in token_ids:
        if tokenizer.is_added(token_id):
            yield tokenizer.decode([token_id], skip_special_tokens=False)
        else:
            yield decoder.decode(tokenizer.token_bytes(token_id))


def _without_names(reason: str | None) -> str | None:
    return (
        "preempted: another request needed its memory"
        if reason is not None and reason.startswith("preempted")
        else reason
    )
