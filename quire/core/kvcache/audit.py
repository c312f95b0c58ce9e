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

from quire.core.kvcache.manager import BlockTable, KVCacheManager
from quire.core.kvcache.pool import BlockPool
from quire.core.kvcache.prefix import ChainKeys, PrefixIndex, PrefixNode


def audit_manager(
    manager: KVCacheManager, tables: Iterable[BlockTable], *, deep: bool = True
) -> None:
    """Check the pool, the index and how `tables` (all that exist) name the blocks."""
    tables = list(tables)
    audit_pool(manager.pool)
    _audit_references(manager.pool, tables)
    audit_index(manager.index, manager.pool, deep=deep)
    num_unused = 0
    for table in tables:
        _audit_table(manager, table)
        num_unused += len(table.blocks) * manager.block_size - table.num_filled
    assert manager.num_unused_slots == num_unused, (
        f"{manager.num_unused_slots} unused slots counted, {num_unused} exist"
    )


def audit_pool(pool: BlockPool) -> None:
    """Check that the free list holds each unreferenced block once and nothing else;
    its links agree in both directions."""
    sentinel, block, seen = pool.num_blocks, pool.num_blocks, set[int]()
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
    for block, node in index._by_block.items():
        assert node.block == block, f"block {block} is cached under a node of block {node.block}"
        num_full += _audit_node(index, pool, node)
        if deep and node.digest:
            _audit_digest(index, node)
    assert len(index._by_digest) == num_full, (
        f"{len(index._by_digest)} digests for {num_full} full blocks"
    )
    for namespace, root in index._roots.items():
        is_live = root.namespace == namespace and root.block == -1 and root.children
        assert is_live, f"namespace {namespace} has a stale root"
        _audit_children(index, root)


def _audit_references(pool: BlockPool, tables: list[BlockTable]) -> None:
    owners: Counter[int] = Counter()
    places: dict[int, int] = {}
    for table in tables:
        assert len(set(table.blocks)) == len(table.blocks), (
            f"a table names a block twice: {table.blocks}"
        )
        owners.update(table.blocks)
        for place, block in enumerate(table.blocks):
            known = places.setdefault(block, place)
            assert known == place, (
                f"block {block} is shared at places {known} and {place} of two tables"
            )
    for block, count in enumerate(pool.ref_counts):
        assert owners[block] == count, (
            f"block {block}: {count} owners counted, {owners[block]} tables name it"
        )


def _audit_table(manager: KVCacheManager, table: BlockTable) -> None:
    num_slots = len(table.blocks) * manager.block_size
    assert 0 <= table.num_filled <= num_slots, f"{table.num_filled} tokens in {num_slots} slots"
    assert num_slots - table.num_filled < manager.block_size, (
        f"{num_slots} slots for {table.num_filled} tokens"
    )
    if table.chain is None:
        return
    node = table.chain
    for place in range(table.num_chained - 1, -1, -1):
        assert node.block == table.blocks[place], (
            f"place {place}: block {table.blocks[place]}, index says {node.block}"
        )
        assert manager.index.node_of(node.block) is node, (
            f"place {place}: published block {node.block} is not cached"
        )
        assert node.parent is not None, (
            f"place {place}: the chain is shorter than {table.num_chained} blocks"
        )
        node = node.parent
    assert node.block == -1, "the chain is longer than the table's published part"


def _audit_node(index: PrefixIndex, pool: BlockPool, node: PrefixNode) -> bool:
    """Check one node; whether it is a full block."""
    block, parent = node.block, node.parent
    is_full = len(node.tokens) == index.block_size
    assert 0 < len(node.tokens) <= index.block_size, (
        f"block {block} caches {len(node.tokens)} tokens"
    )
    if is_full:
        assert index._by_digest.get(node.digest) is node, (
            f"full block {block} is not found by its digest"
        )
    else:
        assert not node.digest and not node.children, (
            f"partial block {block} has a digest or is continued"
        )
        assert pool.ref_counts[block] == 0, (
            f"partial block {block} is cached while somebody may write to it"
        )
    assert parent is not None, f"block {block} has no parent"
    if parent.block < 0:
        assert index._roots.get(parent.namespace) is parent, (
            f"block {block} hangs on a dropped root"
        )
    else:
        assert index._by_block.get(parent.block) is parent, (
            f"block {block} hangs on block {parent.block}, not cached"
        )
        has_order = pool.ref_counts[block] == 0 or pool.ref_counts[parent.block] > 0
        assert has_order, f"block {block} is referenced, but block {parent.block} before it is not"
    _audit_children(index, node)
    return is_full


def _audit_children(index: PrefixIndex, node: PrefixNode) -> None:
    tokens = [child.tokens for child in node.children]
    assert all(a < b for a, b in pairwise(tokens)), (
        f"children of block {node.block} are out of order"
    )
    for child in node.children:
        assert child.parent is node, f"block {child.block} disowns its parent, block {node.block}"
        assert index._by_block.get(child.block) is child, (
            f"block {child.block}, a child, is not cached"
        )


def _audit_digest(index: PrefixIndex, node: PrefixNode) -> None:
    assert node.parent is not None
    start = PrefixNode(None, (), node.parent.digest, -1)
    keys = ChainKeys(start, index.block_size, index.digest)
    keys.extend_to(node.tokens)
    assert keys.digests == [node.digest], f"block {node.block}: its tokens do not give its digest"
