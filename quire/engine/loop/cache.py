"""Questions about an engine's prompt cache and their answers, between two steps. Plain records,
torch-free."""

from __future__ import annotations

import msgspec

from quire.core.kvcache.events import KVEventBatch
from quire.core.scheduler.prompt_cache import TenantCache, prompt_cache
from quire.engine.loop.step_loop import StepLoop


class EventsSince(msgspec.Struct, frozen=True, tag=True):
    """What was cached and evicted after the event `since` of a log?"""

    log: str
    since: int


class CacheByTenant(msgspec.Struct, frozen=True, tag=True):
    """What is cached, and whose is it?"""


class ClearCache(msgspec.Struct, frozen=True, tag=True):
    """Forget what is cached of a tenant, or of all."""

    tenant: str | None


class CachedTokens(msgspec.Struct, frozen=True, tag=True):
    """The answer to `CacheByTenant`. Counts are since the engine was started, blocks are now."""

    tenants: tuple[TenantCache, ...]
    num_blocks: int
    """Of the pool; `block_size` tokens in each, of each group of layers."""
    block_size: int
    num_cached_blocks: int
    num_kept_blocks: int
    num_kept_evicted: int
    num_missed_tokens: dict[str, int]


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ClearCache`."""

    num_blocks: int


CacheQuestion = EventsSince | CacheByTenant | ClearCache
CacheAnswer = KVEventBatch | CachedTokens | Cleared


def answer_on_cache(loop: StepLoop, question: CacheQuestion) -> CacheAnswer | None:
    """Return what is so between two steps; None where a loop keeps no such account."""
    scheduler = loop.scheduler
    cache = prompt_cache(scheduler.admission.prerequisites)
    if cache is None:
        return None
    if isinstance(question, EventsSince):
        return cache.events.read(question.log, question.since)
    if isinstance(question, ClearCache):
        return Cleared(cache.clear(question.tenant))
    manager = scheduler.manager
    return CachedTokens(
        tuple(cache.by_tenant()),
        manager.pool.num_blocks,
        manager.block_size,
        len(manager.index),
        cache.kept.num_blocks,
        cache.stats.num_kept_evicted,
        dict(cache.stats.num_missed_tokens),
    )
