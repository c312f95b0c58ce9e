"""Endpoints around the prefix cache: fill it ahead of a request, see whose it is, clear it, and
follow what it holds."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.core.kvcache.events import KVEvent, KVEventBatch
from quire.engine.front.client import Client
from quire.errors import UnavailableError
from quire.server.api.retention import Retention
from quire.server.http.body import read_json
from quire.server.http.call import Call, call_of
from quire.server.http.errors import ApiError, bad_request
from quire.server.http.query import MAX_NUMBER, query_of
from quire.server.http.responses import json_response
from quire.server.quota.tenants import is_tenant_name

Runner = Callable[[Call, bytes], Awaitable[dict[str, Any]]]

MAX_FOLLOWERS = 16
"""Who may wait for events at once."""
_POLL_S = 0.05
"""Between two looks at whether the engine has made a step, which costs nothing."""
_LOOK_S = 1.0
"""After which it is asked anyway: its signs of life come four times a second."""


class WarmRequest(msgspec.Struct, kw_only=True):
    """The body of a request to fill the cache: what decides a chat's or a completion's prompt."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    tools: Any = None
    tool_choice: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    ttl: Retention = "1h"
    """How long to keep the prefix."""


class CacheQuery(msgspec.Struct, kw_only=True):
    """Which engine's cache."""

    replica: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0


class ClearQuery(msgspec.Struct, kw_only=True):
    """Whose cache to clear."""

    tenant: Annotated[str, Meta(max_length=64)] = ""
    """Empty: everybody's."""


class KvEventsQuery(msgspec.Struct, kw_only=True):
    """Which events."""

    log: Annotated[str, Meta(max_length=64)] = ""
    """The log that was read before."""
    since: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    """The number of the last event that is known."""
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0
    """How long to wait for one."""
    tokens: Annotated[int, Meta(ge=0, le=1)] = 0
    """1: with the tokens of blocks."""
    replica: Annotated[int, Meta(ge=-1, le=MAX_NUMBER)] = -1
    """-1: the only one."""


class CacheRoutes:
    """The endpoints."""

    def __init__(self, client: Client, chat: Runner, completion: Runner, *, strict: bool) -> None:
        """`chat` and `completion` answer the bodies of these endpoints."""
        self._client, self._is_strict = client, strict
        self._chat, self._completion = chat, completion
        self._num_followers = 0

    async def warm(self, request: Request) -> Response:
        """Compute a prompt and keep it in the cache, without an answer: a body for
        /v1/chat/completions or /v1/completions, and for how long."""
        call = call_of(request)
        body = await read_json(request, WarmRequest, is_strict=self._is_strict)
        if (body.messages is None) == (body.prompt is None):
            raise bad_request("give either messages or prompt: what is to be cached")
        fields = {
            name: value
            for name, value in msgspec.structs.asdict(body).items()
            if value is not None and name != "ttl"
        }
        fields |= {"max_tokens": 1, "prompt_cache_retention": body.ttl}
        run = self._completion if body.messages is None else self._chat
        answer = await run(call, msgspec.json.encode(fields))
        details = answer["usage"]["prompt_tokens_details"]
        result = {
            "object": "cache.warmed",
            "model": answer["model"],
            "prompt_tokens": answer["usage"]["prompt_tokens"],
            "cached_tokens": details["cached_tokens"],
            "cache_write_tokens": details["cache_write_tokens"],
            "ttl": body.ttl,
        }
        return json_response(call, result)

    async def show(self, request: Request) -> Response:
        """Return what the prefix cache holds, by tenant, and how many tokens of prompts it
        missed, by the reason; for admin keys."""
        _check_admin(request)
        replica = self._check_replica(query_of(request, CacheQuery).replica)
        found = await self._client.cached_tokens(replica)
        if found is None:
            raise self._unavailable()
        body = {"object": "cache", **msgspec.structs.asdict(found)}
        body["tenants"] = [dataclasses.asdict(each) for each in found.tenants]
        return json_response(call_of(request), body)

    async def clear(self, request: Request) -> Response:
        """Forget what is cached and not in use, of one tenant or of all, also where it is stored;
        for admin keys."""
        _check_admin(request)
        tenant = query_of(request, ClearQuery).tenant
        if tenant and not is_tenant_name(tenant):
            raise bad_request(
                f"tenant: {tenant!r} is no name of a tenant", param="tenant", code="invalid_query"
            )
        num_blocks = await self._client.clear_cache(tenant or None)
        return json_response(
            call_of(request), {"object": "cache.cleared", "num_blocks": num_blocks}
        )

    async def events(self, request: Request) -> Response:
        """Return what was cached and evicted since an event, or all that is cached where the
        events since then are not known; for admin keys."""
        _check_admin(request)
        query = query_of(request, KvEventsQuery)
        replica = self._one_replica(query.replica)
        if self._num_followers >= MAX_FOLLOWERS:
            raise ApiError(429, "too many follow the events already", code="too_many_followers")
        self._num_followers += 1
        try:
            batch = await self._wait_for_events(query, replica)
        finally:
            self._num_followers -= 1
        return json_response(call_of(request), batch_body(batch, has_tokens=bool(query.tokens)))

    async def _wait_for_events(self, query: KvEventsQuery, replica: int) -> KVEventBatch:
        """Ask until there is something, or for as long as is to be waited. Raises
        UnavailableError."""
        deadline_s = time.monotonic() + query.wait_ms / 1e3
        while True:
            num_steps = self._client.status().num_steps
            batch = await self._client.kv_events(query.log, query.since, replica)
            if batch is None:
                raise self._unavailable()
            if batch.events or batch.is_snapshot:
                return batch
            asked_s = time.monotonic()
            while (now_so := self._client.status()).num_steps == num_steps:
                if now_so.is_draining:
                    raise self._unavailable()
                now = time.monotonic()
                if now >= deadline_s:
                    return batch
                if now - asked_s >= _LOOK_S:
                    break
                await asyncio.sleep(min(_POLL_S, deadline_s - now))
            if time.monotonic() >= deadline_s:
                return batch

    def _one_replica(self, replica: int) -> int:
        """Return the number of the engine whose events are wanted. Raises ApiError."""
        num_replicas = len(self._client.status().replicas)
        if replica < 0 and num_replicas > 1:
            raise bad_request(
                f"there are {num_replicas} engines, each with events of its own: give a replica",
                param="replica",
            )
        return self._check_replica(max(0, replica))

    def _check_replica(self, replica: int) -> int:
        if replica >= max(1, len(self._client.status().replicas)):
            raise ApiError(404, f"there is no replica {replica}", code="unknown_replica")
        return replica

    def _unavailable(self) -> UnavailableError:
        state = self._client.status().state
        return UnavailableError(
            f"the engine cannot be asked now: it is {state}", state=state, retry_after_s=5
        )


def batch_body(batch: KVEventBatch, *, has_tokens: bool) -> dict[str, Any]:
    """Return a batch as it is sent; names of events and fields are vLLM's where it has them."""
    return {
        "object": "kv_events",
        "log": batch.log,
        "last": batch.last,
        "is_snapshot": batch.is_snapshot,
        "is_cut": batch.is_cut,
        "ts": batch.time_s,
        "block_size": batch.block_size,
        "events": list(_events(batch, has_tokens)),
    }


def _events(batch: KVEventBatch, has_tokens: bool) -> Iterator[dict[str, Any]]:
    first = batch.last - len(batch.events) + 1
    for place, event in enumerate(batch.events):
        body = _event_body(event, batch.block_size, has_tokens)
        yield body if batch.is_snapshot else {"seq": first + place, **body}


def _event_body(event: KVEvent, block_size: int, has_tokens: bool) -> dict[str, Any]:
    hashes = [digest.hex() for digest in event.digests]
    if event.kind == "cleared":
        return {"type": "AllBlocksCleared"}
    if event.kind == "removed":
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium}
    if event.kind == "prompt":
        return {
            "type": "PromptBlocks",
            "block_hashes": hashes,
            "request_id": event.request_id,
            "num_tokens": event.num_tokens,
        }
    names = event.namespace[2:] if event.namespace[:1] == ("salt",) else event.namespace
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": event.parent.hex() or None,
        "token_ids": [token for block in event.tokens for token in block] if has_tokens else [],
        "block_size": block_size,
        "lora_id": names[1] if names[:1] == ("adapter",) else None,
        "medium": event.medium,
    }


def _check_admin(request: Request) -> None:
    if not call_of(request).tenant.is_admin:
        raise ApiError(
            403, "only an admin key may see or clear what the cache holds", code="admin_needed"
        )
