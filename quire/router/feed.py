"""Following what the back ends cache: one task for each, which asks for events and waits for them.

A back end that has no such events, or shows them to other keys only, is asked again now and then;
one that fails is guessed about until it answers. Nothing waits for a feed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Literal

import msgspec

from quire.common.failures import log_failure
from quire.common.http_client import HttpClient, HttpError, HttpRequest
from quire.common.watch_clock import counted_timeout
from quire.config.route import RouteConfig
from quire.router.fleet import Fleet, Replica
from quire.routing.observed import POOL, ObservedMemory

logger = logging.getLogger(__name__)

POLICIES = ("kv-aware", "prefix-aware")
"""That make use of it."""
_WAIT_MS = 10_000
_SPARE_S = 10.0
"""Beyond the wait for events, for the answer to come."""
_RETRY_S, _REFUSED_S = 2.0, 60.0
_PAUSE_S = 0.05
"""After an answer, so that a busy back end is not asked once a step."""
_ROUND_S = 0.5
"""Between two looks at which back ends there are."""


class FeedEvent(msgspec.Struct):
    """One event, as far as it matters here."""

    type: str
    block_hashes: list[str] = []
    request_id: str = ""
    num_tokens: int = 0
    medium: str | None = POOL
    """Which tier the blocks are in."""


class FeedBatch(msgspec.Struct):
    """An answer."""

    object: Literal["kv_events"]
    log: str
    last: int
    block_size: int
    is_snapshot: bool
    events: list[FeedEvent]


_decoder = msgspec.json.Decoder(FeedBatch)


class Feeds:
    """The tasks."""

    def __init__(self, config: RouteConfig, fleet: Fleet, headers: Mapping[str, str]) -> None:
        self._config, self._fleet = config, fleet
        self._headers = dict(headers)
        self._by_replica: dict[Replica, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, where the policy makes use of it."""
        if self._config.policy in POLICIES:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End."""
        tasks = [*self._by_replica.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            replicas = set(self._fleet.replicas)
            for replica in self._by_replica.keys() - replicas:
                self._by_replica.pop(replica).cancel()
            for replica in replicas - self._by_replica.keys():
                self._by_replica[replica] = asyncio.create_task(self._follow(replica))
            await asyncio.sleep(_ROUND_S)

    async def _follow(self, replica: Replica) -> None:
        place = ("", 0)
        while True:
            wait_s = _RETRY_S
            try:
                batch = await self._read(replica, *place)
            except (HttpError, msgspec.DecodeError, UnicodeDecodeError, TimeoutError):
                batch = None
            except Exception as error:
                log_failure(logger, f"the cache of {replica.name} cannot be followed", error)
                batch = None
            memory = self._fleet.memory(replica)
            if batch is None or memory is None:
                wait_s = _RETRY_S
            elif isinstance(batch, int):
                wait_s = _RETRY_S if batch >= 500 else _REFUSED_S
                if batch == 403:
                    logger.warning("%s shows what it caches to admin keys alone", replica.name)
            else:
                if batch.is_snapshot or (memory.is_followed and batch.log == place[0]):
                    take(memory, batch)
                    place = (batch.log, batch.last)
                else:  # it was forgotten meanwhile: from a snapshot on
                    place = ("", 0)
                await asyncio.sleep(_PAUSE_S)
                continue
            if memory is not None and memory.is_followed:
                memory.unfollow()
            place = ("", 0)
            await asyncio.sleep(wait_s)

    async def _read(self, replica: Replica, log: str, since: int) -> FeedBatch | int:
        """Return the next events, or the status of an answer without any. Raises HttpError."""
        address = replica.client.address
        scheme = "https" if address.is_secure else "http"
        wait_s = _WAIT_MS / 1e3 + _SPARE_S
        async with HttpClient(
            f"{scheme}://{address.netloc}{address.path}",
            timeout_s=wait_s,
            connect_timeout_s=self._config.connect_timeout_s,
            host_name=replica.client.host_name,
        ) as client:
            path = f"/v1/kv_events?log={log}&since={since}&wait_ms={_WAIT_MS}"
            async with counted_timeout(self._config.connect_timeout_s + wait_s):
                answer = await client.request(HttpRequest("GET", path, headers=self._headers))
        return _decoder.decode(answer.body) if answer.status == 200 else answer.status


def take(memory: ObservedMemory, batch: FeedBatch) -> None:
    """Have a memory know what a batch says."""
    if batch.is_snapshot:
        memory.reset(())
    for event in batch.events:
        if event.type == "BlockStored":
            memory.stored(event.block_hashes, event.medium or POOL)
        elif event.type == "BlockRemoved":
            memory.removed(event.block_hashes, event.medium or POOL)
        elif event.type == "AllBlocksCleared":
            memory.cleared()
        elif event.type == "PromptBlocks":
            # the server's id, and a number of its own behind the last dot
            request_id = event.request_id.rpartition(".")[0]
            memory.asked(request_id, event.block_hashes, event.num_tokens, batch.block_size)
