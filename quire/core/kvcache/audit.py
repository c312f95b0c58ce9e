"""Invariants of the KV bookkeeping: what must hold between any two operations, as checks that name
what is broken.

Reads everything, changes nothing. O(blocks + table entries). A failure is a bug of Quire's own,
hence `AssertionError`. Tests call it after every step; in production it is cheap enough for idle
moments with `deep=False`, which leaves out recomputing the digests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from quire.core.kvcache.kept import TENANT_SHARE, TOTAL_SHARE, KeptNodes
from quire.core.kvcache.manager import BlockTable, KVCacheManager
from quire.core.kvcache.pool import BlockPool
from quire.core.kvcache.prefix import NO_BLOCK, ChainKeys, PrefixIndex, PrefixNode


def audit_manager(
    manager: KVCacheManager, tables: Iterable[BlockTable], *, deep: bool = True
) -> None:
    """Check the pool, the index and how `tables` (all that exist) name the blocks."""
    tables = list(tables)
    audit_pool(manager.pool)
    for block in range(manager.pool.num_blocks):
        assert not manager.pool.is_kept(block) or block in manager.index, (
            f"block {block} is kept and holds nothing"
        )
    _audit_references(manager, tables)
    audit_index(manager.index, manager.pool, deep=deep)
    num_unused = 0
    for table in tables:
        _audit_table(manager, table)
        num_unused += manager.num_places(table) * manager.block_size - table.num_filled
    assert manager.num_unused_slots == num_unused, (
        f"{manager.num_unused_slots} unused slots counted, {num_unused} exist"
    )


def audit_pool(pool: BlockPool) -> None:
    """Check that the free lists hold each unreferenced block once and nothing else, kept ones in
    the second; their links agree in both directions."""
    seen = set[int]()
    for sentinel, is_kept in ((pool.num_blocks, False), (pool.num_blocks + 1, True)):
        block = sentinel
        while True:
            after = pool._next[block]
            assert pool._prev[after] == block, (
                f"free list: {block} -> {after}, but {after} comes after {pool._prev[after]}"
            )
            if after == sentinel:
                break
            assert after not in seen, f"block {after} is twice in the free list"
            assert pool.ref_counts[after] == 0, (
                f"block {after} is free and has {pool.ref_counts[after]} owners"
            )
            assert pool.is_kept(after) == is_kept, f"block {after} is in the wrong list"
            seen.add(after)
            block = after
    assert len(seen) == pool.num_free, (
        f"{len(seen)} blocks in the free list, num_free={pool.num_free}"
    )
    num_unreferenced = sum(count == 0 for count in pool.ref_counts)
    assert num_unreferenced == pool.num_free, (
        f"{num_unreferenced} blocks without owner, {pool.num_free} free: a leak"
    )


def audit_index(index: PrefixIndex, pool: BlockPool, *, deep: bool = True) -> None:
    """Check that every cached block hangs on a live parent, in order, under its own digest,
    and its referenced ones are full."""
    num_full = 0
    cached = dict[int, PrefixNode]()
    for node in index.nodes():
        cached.update((block, node) for block in node.blocks if block != NO_BLOCK)
        num_full += _audit_node(index, pool, node)
        if deep and node.digest:
            _audit_digest(index, node)
    assert cached == index._by_block, f"{index._by_block} are cached, the tree has {cached}"
    assert len(index._by_digest) == num_full, (
        f"{len(index._by_digest)} digests for {num_full} full nodes"
    )
    for namespace, root in index._roots.items():
        is_live = root.namespace == namespace and not root.blocks and root.children
        assert is_live, f"namespace {namespace} has a stale root"
        _audit_children(index, root)


def audit_kept(kept: KeptNodes, manager: KVCacheManager) -> None:
    """Check that what is kept is cached, with all that is before it and at least as long, within
    the shares, and counted right."""
    counts = Counter[str]()
    for digest, each in kept._kept.items():
        node, parent = each.node, each.node.parent
        assert manager.index._by_digest.get(digest) is node, f"{node.blocks} are kept, not cached"
        assert parent is not None
        if parent.parent is not None:
            before = kept.until_s(parent.digest)
            assert before is not None and before >= each.until_s, (
                f"blocks {node.blocks} are kept longer than what is before them"
            )
        counts[each.tenant] += each.num_blocks
    assert kept._num_by_tenant == {name: count for name, count in counts.items()}, (
        f"{kept._num_by_tenant} blocks are counted, {counts} are kept"
    )
    assert kept.num_blocks == counts.total()
    most = manager.pool.num_blocks
    assert kept.num_blocks <= TOTAL_SHARE * most, f"{kept.num_blocks} of {most} blocks are kept"
    assert all(count <= TENANT_SHARE * most for count in counts.values()), f"kept: {counts}"
    kept_blocks = {
        block for each in kept._kept.values() for block in each.node.blocks if block != NO_BLOCK
    }
    for block in range(most):
        assert not manager.pool.is_kept(block) or block in kept_blocks, (
            f"block {block} is handed out last, and is not kept"
        )
    earliest = {digest: end_s for end_s, digest in sorted(kept._ends, reverse=True)}
    for digest, end_s in kept._ending.items():
        assert earliest[digest] <= end_s and (end_s, digest) in kept._ends
    assert all(kept._ending[digest] <= each.until_s for digest, each in kept._kept.items())


def _audit_references(manager: KVCacheManager, tables: list[BlockTable]) -> None:
    owners: Counter[int] = Counter()
    entries: dict[int, int] = {}
    for table in tables:
        named = [block for block in table.blocks if block != NO_BLOCK]
        assert len(set(named)) == len(named), f"a table names a block twice: {table.blocks}"
        owners.update(named)
        for entry, block in enumerate(table.blocks):
            known = entry if block == NO_BLOCK else entries.setdefault(block, entry)
            assert known == entry, (
                f"block {block} is shared at entries {known} and {entry} of two tables"
            )
    for block, count in enumerate(manager.pool.ref_counts):
        assert owners[block] == count, (
            f"block {block}: {count} owners counted, {owners[block]} tables name it"
        )
    num_extra = sum(
        owners[block] - 1
        for block, entry in entries.items()
        if manager.index.windows[entry % manager.num_groups] is not None
    )
    assert manager.num_extra_references == num_extra, (
        f"{manager.num_extra_references} extra references counted, {num_extra} exist"
    )


def _audit_table(manager: KVCacheManager, table: BlockTable) -> None:
    num_slots = manager.num_places(table) * manager.block_size
    assert 0 <= table.num_filled <= num_slots, f"{table.num_filled} tokens in {num_slots} slots"
    assert num_slots - table.num_filled < manager.block_size, (
        f"{num_slots} slots for {table.num_filled} tokens"
    )
    _audit_given_back(manager, table)
    if table.chain is None:
        return
    node = table.chain
    for place in range(table.num_chained - 1, -1, -1):
        first = place * manager.num_groups
        for block, cached in zip(table.blocks[first:], node.blocks, strict=False):
            if block == NO_BLOCK:
                continue
            assert manager.index.node_of(block) is node, (
                f"place {place}: published block {block} is not cached"
            )
            assert block == cached, f"place {place}: block {block}, index says {cached}"
        assert node.parent is not None, (
            f"place {place}: the chain is shorter than {table.num_chained} blocks"
        )
        node = node.parent
    assert node.parent is None, "the chain is longer than the table's published part"


def _audit_given_back(manager: KVCacheManager, table: BlockTable) -> None:
    """Of each group with a window, what is before the first place kept was given back, and nothing
    else; of the others nothing was."""
    starts = [0] * manager.num_groups
    for (_, groups), start in zip(manager._windows, table.starts, strict=True):
        for group in groups:
            starts[group] = start
    for entry, block in enumerate(table.blocks):
        place, group = divmod(entry, manager.num_groups)
        is_kept = place >= starts[group]
        assert (block != NO_BLOCK) == is_kept, (
            f"place {place} of group {group}: block {block}, kept from {starts[group]} on"
        )


def _audit_node(index: PrefixIndex, pool: BlockPool, node: PrefixNode) -> bool:
    """Check one node; whether it is a full one."""
    blocks, parent = node.blocks, node.parent
    is_full = len(node.tokens) == index.block_size
    assert 0 < len(node.tokens) <= index.block_size, (
        f"blocks {blocks} cache {len(node.tokens)} tokens"
    )
    assert node.children or not node.is_empty, f"a node of {node.tokens} is good for nothing"
    if is_full:
        assert index._by_digest.get(node.digest) is node, (
            f"full blocks {blocks} are not found by their digest"
        )
    else:
        assert not node.digest and not node.children, (
            f"partial blocks {blocks} have a digest or are continued"
        )
        assert node.is_complete, f"one of the partial blocks {blocks} is missing"
        assert not any(pool.ref_counts[block] for block in blocks), (
            f"partial blocks {blocks} are cached while a sequence may write to them"
        )
    assert parent is not None, f"blocks {blocks} have no parent"
    if parent.parent is None:
        assert index._roots.get(parent.namespace) is parent, (
            f"blocks {blocks} hang on a dropped root"
        )
    for group, window in enumerate(index.windows):
        if window is None:
            _audit_order(pool, node, parent, group)
    _audit_children(index, node)
    return is_full


def _audit_order(pool: BlockPool, node: PrefixNode, parent: PrefixNode, group: int) -> None:
    """In a group that keeps everything, a node has its block, and one that is referenced has
    parents that are."""
    block = node.blocks[group]
    assert block != NO_BLOCK, f"a node of {node.tokens} has lost a block of group {group}"
    if parent.parent is not None:
        before = parent.blocks[group]
        has_order = pool.ref_counts[block] == 0 or pool.ref_counts[before] > 0
        assert has_order, f"block {block} is referenced, but block {before} before it is not"


def _audit_children(index: PrefixIndex, node: PrefixNode) -> None:
    tokens = [child.tokens for child in node.children]
    assert all(a < b for a, b in pairwise(tokens)), (
        f"children of blocks {node.blocks} are out of order"
    )
    for child in node.children:
        assert child.parent is node, (
            f"blocks {child.blocks} disown their parent, blocks {node.blocks}"
        )


def _audit_digest(index: PrefixIndex, node: PrefixNode) -> None:
    assert node.parent is not None
    start = PrefixNode(None, (), node.parent.digest, [])
    keys = ChainKeys(start, index.block_size, index.digest)
    keys.extend_to(node.tokens)
    assert keys.digests == [node.digest], (
        f"blocks {node.blocks}: their tokens do not give their digest"
    )
