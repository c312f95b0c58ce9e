"""Kept prefixes: cached blocks that are evicted after all others, for a time that was wished for.

Nothing is reserved. A kept block that no sequence uses is free like any other, so that who is
admitted, preempted or given memory does not depend on what is kept; the pool hands kept blocks out
when it has no other (`BlockPool`). What a tenant may keep is a share of the pool, and so is what
all may together: beyond it, what was used least recently is treated as everything else again.

With a block everything before it is kept, at least as long: no block outlives its prefix.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.kvcache.pool import BlockPool
from quire.core.kvcache.prefix import NO_BLOCK, PrefixNode

TENANT_SHARE, TOTAL_SHARE = 0.25, 0.5
"""Of the pool's blocks: what one tenant may keep, and what all may."""
_MAX_PAST = 1024
"""Ends of what was forgotten since that may be remembered, beside one for each kept node."""


@dataclass(slots=True)
class _Kept:
    """One node, and on whose account it is kept."""

    node: PrefixNode
    tenant: str
    until_s: float
    num_blocks: int
    """As it was when it was last counted."""


class KeptNodes:
    """What is kept of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[bytes, _Kept] = {}
        self._by_tenant: dict[str, OrderedDict[bytes, None]] = {}
        """Of each tenant, what was used least recently first; of one prompt, its end first."""
        self._num_by_tenant: dict[str, int] = {}
        """Blocks."""
        self._ends: list[tuple[float, bytes]] = []
        """A heap; each kept digest is in it, at or before its end."""
        self._ending: dict[bytes, float] = {}
        """The earliest entry of each digest, also of one that was forgotten since."""
        self.num_blocks = 0
        self.num_evicted = 0
        """Blocks that were needed by sequences before their time was over."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def num_of(self, tenant: str) -> int:
        """Return blocks that a tenant keeps."""
        return self._num_by_tenant.get(tenant, 0)

    def until_s(self, digest: bytes) -> float | None:
        """Return until when a node is kept; None where it is not."""
        found = self._kept.get(digest)
        return None if found is None else found.until_s

    def keep(self, nodes: Sequence[PrefixNode], tenant: str, until_s: float) -> None:
        """Keep a prefix, from its beginning on, until a moment at least; as much of its beginning
        as the shares allow."""
        owners = {tenant: None}  # of others, a node may have more blocks than when it was counted
        for node in reversed(nodes):
            known = self._drop(node.digest)
            end_s = until_s if known is None else max(until_s, known.until_s)
            owner = tenant if known is None else known.tenant
            owners[owner] = None
            self._enter(_Kept(node, owner, end_s, 0))
        most = self._pool.num_blocks
        for owner in owners:
            while self.num_of(owner) > TENANT_SHARE * most:
                self._release_oldest(owner)
        while self.num_blocks > TOTAL_SHARE * most:
            self._release_oldest(max(self._num_by_tenant, key=self.num_of))

    def expire(self, now: float) -> None:
        """Let go of what has been kept for its time."""
        while self._ends and self._ends[0][0] <= now:
            end_s, digest = heapq.heappop(self._ends)
            if self._ending.get(digest) != end_s:
                continue  # it had an earlier one
            del self._ending[digest]
            found = self._kept.get(digest)
            if found is not None and found.until_s > now:
                self._note_end(found)
            elif found is not None:
                self._release(digest)

    def forget(self, node: PrefixNode, *, is_eviction: bool) -> None:
        """Note that a node is about to leave the index."""
        found = self._kept.get(node.digest)
        if found is not None and found.node is node:
            self.num_evicted += found.num_blocks if is_eviction else 0
            self._release(node.digest)

    def _enter(self, kept: _Kept) -> None:
        digest = kept.node.digest
        for block in kept.node.blocks:
            if block != NO_BLOCK:
                self._pool.keep(block)
                kept.num_blocks += 1
        self._kept[digest] = kept
        self._by_tenant.setdefault(kept.tenant, OrderedDict())[digest] = None
        self._num_by_tenant[kept.tenant] = self.num_of(kept.tenant) + kept.num_blocks
        self.num_blocks += kept.num_blocks
        if kept.until_s < self._ending.get(digest, math.inf):
            self._note_end(kept)

    def _note_end(self, kept: _Kept) -> None:
        if len(self._ends) > 2 * len(self._kept) + _MAX_PAST:  # most are of what was forgotten
            self._ending = {digest: each.until_s for digest, each in self._kept.items()}
            self._ends = [(end_s, digest) for digest, end_s in self._ending.items()]
            heapq.heapify(self._ends)
        self._ending[kept.node.digest] = kept.until_s
        heapq.heappush(self._ends, (kept.until_s, kept.node.digest))

    def _drop(self, digest: bytes) -> _Kept | None:
        """Take a node out of the accounts."""
        found = self._kept.pop(digest, None)
        if found is not None:
            mine = self._by_tenant[found.tenant]
            del mine[digest]
            self._num_by_tenant[found.tenant] -= found.num_blocks
            if not mine:
                del self._by_tenant[found.tenant], self._num_by_tenant[found.tenant]
            self.num_blocks -= found.num_blocks
        return found

    def _release(self, digest: bytes) -> None:
        found = self._drop(digest)
        assert found is not None
        for block in found.node.blocks:
            if block != NO_BLOCK:
                self._pool.unkeep(block)

    def _release_oldest(self, tenant: str) -> None:
        """Let go of what a tenant used least recently, and of what others keep behind it."""
        pending = [self._kept[next(iter(self._by_tenant[tenant]))].node]
        while pending:
            node = pending.pop()
            self._release(node.digest)
            pending += [child for child in node.children if child.digest in self._kept]
