"""The prompt cache as its users see it: prefixes that are kept for a time, why a prompt was not
found, events, and counts by tenant.

A prerequisite that no sequence ever waits for: it hears of admissions, of ends and of the prefix
index, and changes nothing but the order in which blocks that no sequence uses are evicted. So no
answer, and no decision on who runs, depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.kvcache.events import KVEventLog
from quire.core.kvcache.kept import KeptNodes
from quire.core.kvcache.prefix import Namespace, PrefixNode
from quire.core.plan import Record
from quire.core.request import CacheMiss, Sequence
from quire.core.scheduler.prerequisites import Settled
from quire.core.scheduler.resources import KVBlocks

MAX_REMEMBERED = 1 << 15
"""Evicted places, by which a miss is told from a prompt that never came: half a million tokens in
blocks of 16."""
MAX_NAMESPACES = 1 << 12
"""Of which it is known whose they are, beside those of which something is cached."""


@dataclass(slots=True)
class CacheStats:
    """Counts since the engine was started; they outlive a control plane."""

    num_missed_tokens: dict[str, int] = field(default_factory=dict)
    """Of whole blocks of prompts, by the reason (`CacheMiss.reason`)."""
    num_kept_evicted: int = 0


@dataclass(frozen=True, slots=True)
class TenantCache:
    """What the cache holds of one tenant, in tokens of whole blocks."""

    tenant: str
    num_cached_tokens: int
    num_kept_blocks: int
    """Evicted last, for a time."""


class PromptCache:
    """Implements `Prerequisite`, `Retained`, `BlockUser` and `IndexWatcher`."""

    name = "prompt_cache"
    has_orders = False

    def __init__(self, stats: CacheStats, log: str) -> None:
        """`log` names the log of events: another one for each control plane."""
        self.stats = stats
        self.events = KVEventLog(log)
        self.kept: KeptNodes
        self._blocks: KVBlocks
        self._now = 0.0
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._tenants: OrderedDict[Namespace, set[str]] = OrderedDict()
        self._max_namespaces = MAX_NAMESPACES
        self._is_clearing = False

    def attach(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self.kept = KeptNodes(blocks.manager.pool)
        blocks.manager.index.watchers.append(self)
        self.events.follow(blocks.manager.index)

    # -- as a prerequisite
    # ----------------------------------------------------------------------------------------------

    def refusal(self, sequence: Sequence) -> str | None:
        return None

    def park(self, sequence: Sequence) -> None:
        raise AssertionError("no sequence waits for the prompt cache")

    def unpark(self, sequence: Sequence) -> None:
        return

    def parked(self) -> list[Sequence]:
        return []

    def take_orders(self, now: float) -> tuple[Record, ...]:
        self._tick(now)
        return ()

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        self._tick(now)
        return []

    def lose_flights(self) -> None:
        return

    def _tick(self, now: float) -> None:
        self._now = self.events.time_s = now
        self.kept.expire(now)

    # -- sequences come and go
    # ----------------------------------------------------------------------------------------------

    def retain(self, sequence: Sequence) -> None:
        request, keys = sequence.request, sequence.keys
        if sequence.index or request.metrics.cache_miss is not None:
            return
        miss = request.metrics.cache_miss = self._miss(sequence)
        if miss.reason:
            counts = self.stats.num_missed_tokens
            counts[miss.reason] = counts.get(miss.reason, 0) + miss.num_tokens
        if keys is not None:
            tenants = self._tenants.setdefault(request.namespace, set())
            tenants.add(request.tenant)
            self._tenants.move_to_end(request.namespace)
            if len(self._tenants) > self._max_namespaces:
                self._forget_namespaces()
            num_places = sequence.num_prompt_tokens // keys.block_size
            digests = tuple(keys.digests[:num_places])
            self.events.asked(request.request_id, digests, sequence.num_prompt_tokens)

    def _forget_namespaces(self) -> None:
        """Forget whose the least recently used namespaces are, where nothing of them is cached; the
        others are no more than the pool has blocks."""
        index = self._blocks.manager.index
        for name in list(self._tenants)[:-MAX_NAMESPACES]:
            if not index.root(name).children:
                del self._tenants[name]
        self._max_namespaces = max(MAX_NAMESPACES, 2 * len(self._tenants))

    def release(self, sequence: Sequence) -> None:
        """Keep what is to be kept of its prompt: whole blocks that are cached."""
        request, keys = sequence.request, sequence.keys
        if not request.keep or keys is None or sequence.index:
            return
        nodes, node, index = list[PrefixNode](), keys.root, self._blocks.manager.index
        num_places = sequence.num_prompt_tokens // keys.block_size
        for tokens, digest in zip(keys.tokens[:num_places], keys.digests, strict=False):
            child = index.child(node, tokens, digest)
            if child is None:
                break
            nodes.append(child)
            node = child
        for num_tokens, seconds in request.keep:
            end = None if num_tokens is None else num_tokens // keys.block_size
            self.kept.keep(nodes[:end], request.tenant, self._now + seconds)

    def _miss(self, sequence: Sequence) -> CacheMiss:
        """Say why its prompt was not found as a whole. The cache has been asked already."""
        keys, num_hit = sequence.keys, sequence.request.metrics.num_prefix_hit_tokens
        if keys is None:
            return CacheMiss("disabled", sequence.num_prompt_tokens)
        size = keys.block_size
        first, end = num_hit // size, (sequence.num_prompt_tokens - 1) // size
        if first >= end:
            return CacheMiss("", 0)
        num_missed = end * size - num_hit
        if not sequence.request.reads_cache or sequence.request.scoring is not None:
            return CacheMiss("not_read", num_missed)
        keys.extend_to(sequence.content_ids)
        place = first
        while place < end and keys.digests[place] in self._evicted:
            place += 1
        if place > first:
            return CacheMiss("evicted", num_missed, place * size - num_hit)
        index = self._blocks.manager.index
        node = index.root(sequence.request.namespace)
        for tokens, digest in zip(keys.tokens[:first], keys.digests, strict=False):
            child = index.child(node, tokens, digest)
            if child is None:  # it was found, and has made room for this very sequence
                return CacheMiss("new", num_missed)
            node = child
        if not num_hit or not node.children:  # others may have nothing in common with it
            return CacheMiss("new", num_missed)
        return CacheMiss("differs", num_missed)

    # -- what is cached
    # ----------------------------------------------------------------------------------------------

    def published(self, node: PrefixNode) -> None:
        self._evicted.pop(node.digest, None)

    def distrusted(self, node: PrefixNode) -> None:
        """Do nothing: it is forgotten next."""

    def forgotten(self, node: PrefixNode) -> None:
        num_before = self.kept.num_evicted
        self.kept.forget(node, is_eviction=not self._is_clearing)
        self.stats.num_kept_evicted += self.kept.num_evicted - num_before
        if self._is_clearing:
            return
        self._evicted[node.digest] = None
        if len(self._evicted) > MAX_REMEMBERED:
            self._evicted.popitem(last=False)

    def by_tenant(self) -> list[TenantCache]:
        """Return what the cache holds of each tenant. What several have used, which is so only
        where they share it, counts for each."""
        size, counts = self._blocks.manager.block_size, dict[str, int]()
        for node in self._blocks.manager.index.nodes():
            if node.digest:
                for tenant in self._tenants.get(node.namespace, ()):
                    counts[tenant] = counts.get(tenant, 0) + size
        return [
            TenantCache(tenant, count, self.kept.num_of(tenant))
            for tenant, count in sorted(counts.items())
        ]

    def clear(self, tenant: str | None = None) -> int:
        """Forget what is cached and in no sequence's use: all of it, or what no other tenant has
        used, here and wherever else it is kept. Return how many blocks that are."""
        manager, num_forgotten = self._blocks.manager, 0
        self._blocks.forget_matches()
        nodes = [node for node in manager.index.nodes() if self._is_of(node, tenant)]
        self._is_clearing = True
        for node in reversed(nodes):  # what continues a node comes behind it
            num_forgotten += manager.forget_node(node)
        self._is_clearing = False
        return num_forgotten

    def _is_of(self, node: PrefixNode, tenant: str | None) -> bool:
        return tenant is None or self._tenants.get(node.namespace) == {tenant}


def prompt_cache(prerequisites: Iterable[object]) -> PromptCache | None:
    """Return the one of a scheduler."""
    return next((each for each in prerequisites if isinstance(each, PromptCache)), None)
