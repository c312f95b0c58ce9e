"""The KV manager: sharing, copy-on-write, publishing, merging and eviction."""

from quire.core.kvcache.audit import audit_manager
from quire.core.kvcache.manager import UNCHANGED, BlockTable, KVCacheManager
from quire.core.kvcache.prefix import ChainKeys
from quire.core.plan import BlockCopy

SIZE = 4


def _filled(manager: KVCacheManager, tokens: list[int]) -> tuple[BlockTable, ChainKeys]:
    """A table whose tokens are all computed and published."""
    table, keys = manager.new_table(()), manager.index.keys(())
    manager.extend(table, 0, len(tokens))
    manager.publish(table, keys, tokens, len(tokens))
    return table, keys


def test_extension_takes_blocks_only_when_one_is_begun() -> None:
    manager = KVCacheManager(8, SIZE)
    table = manager.new_table(())
    assert manager.num_needed(table, 0, 5) == 2
    assert len(manager.extend(table, 0, 5).appended) == 2
    assert manager.num_unused_slots == 3
    assert manager.extend(table, 5, 8) is UNCHANGED
    assert manager.num_needed(table, 8, 9) == 1
    assert manager.num_unused_slots == 0
    audit_manager(manager, [table])


def test_fill_slot_does_what_extend_does_where_it_may() -> None:
    manager = KVCacheManager(8, SIZE)
    table = manager.new_table(())
    manager.extend(table, 0, 3)
    assert manager.fill_slot(table, 3) and table.num_filled == 4
    assert not manager.fill_slot(table, 4), "a new block is needed"
    manager.extend(table, 4, 5)
    twin = manager.fork(table)
    assert not manager.fill_slot(twin, 5), "the block is shared"
    audit_manager(manager, [table, twin])


def test_a_fork_shares_everything_and_the_first_write_copies_only_the_partial_block() -> None:
    manager = KVCacheManager(8, SIZE)
    table = manager.new_table(())
    manager.extend(table, 0, 6)
    twin = manager.fork(table)
    assert manager.pool.num_used == 2 and twin.blocks == table.blocks
    change = manager.extend(twin, 6, 7)
    assert change.copies == (BlockCopy(table.blocks[1], twin.blocks[1]),)
    assert change.replaced_index == 1
    assert twin.blocks[0] == table.blocks[0] and manager.pool.num_used == 3
    assert manager.extend(table, 6, 7) is UNCHANGED, "the last owner writes in place"
    audit_manager(manager, [table, twin])


def test_a_fork_at_a_block_boundary_needs_no_copy() -> None:
    manager = KVCacheManager(8, SIZE)
    table = manager.new_table(())
    manager.extend(table, 0, 8)
    twin = manager.fork(table)
    assert manager.extend(twin, 8, 9).copies == ()
    audit_manager(manager, [table, twin])


def test_a_match_is_shared_and_a_partly_matching_block_copied() -> None:
    manager = KVCacheManager(8, SIZE)
    tokens = list(range(10))
    first, _ = _filled(manager, tokens)
    manager.release(first, tokens, 10)
    table, keys = manager.new_table(()), manager.index.keys(())
    match = manager.match(keys, [*range(9), 99, 99], 10)
    assert match.num_tokens == 9 and len(match.nodes) == 2 and match.partial is not None
    [source] = match.partial.blocks
    assert manager.adopt(table, match) == (BlockCopy(source, table.blocks[2]),)
    audit_manager(manager, [table])


def test_the_last_free_block_is_taken_over_instead_of_copied_onto_itself() -> None:
    manager = KVCacheManager(1, SIZE)
    table, _ = _filled(manager, [1, 2, 3])
    manager.release(table, [1, 2, 3], 3)
    again, keys = manager.new_table(()), manager.index.keys(())
    match = manager.match(keys, [1, 2, 3, 4], 3)
    assert match.num_tokens == 3
    assert manager.adopt(again, match) == () and again.blocks == [0]
    assert len(manager.index) == 0, "the block is written to, so it must not stay cached"
    audit_manager(manager, [again])


def test_at_most_the_asked_for_tokens_are_matched() -> None:
    manager = KVCacheManager(8, SIZE)
    tokens = list(range(8))
    _filled(manager, tokens)
    match = manager.match(manager.index.keys(()), tokens, 7)
    assert match.num_tokens == 7 and len(match.nodes) == 1
    assert manager.match(manager.index.keys(()), tokens, 0).num_tokens == 0
    assert (
        KVCacheManager(8, SIZE, caching=False).match(manager.index.keys(()), tokens, 7).num_tokens
        == 0
    )


def test_identical_blocks_computed_twice_are_merged() -> None:
    manager = KVCacheManager(8, SIZE)
    tokens = list(range(8))
    one, one_keys = manager.new_table(()), manager.index.keys(())
    two, two_keys = manager.new_table(()), manager.index.keys(())
    manager.extend(one, 0, 8)
    manager.extend(two, 0, 8)
    assert manager.pool.num_used == 4
    assert manager.publish(one, one_keys, tokens, 8) == []
    assert manager.publish(two, two_keys, tokens, 8) == [0, 1]
    assert two.blocks == one.blocks and manager.pool.num_used == 2 and manager.num_merges == 2
    audit_manager(manager, [one, two])


def test_only_computed_blocks_are_published() -> None:
    manager = KVCacheManager(8, SIZE)
    table, keys = manager.new_table(()), manager.index.keys(())
    manager.extend(table, 0, 12)
    manager.publish(table, keys, list(range(12)), 7)
    assert table.num_chained == 1 and len(manager.index) == 1


def test_freed_chains_are_evicted_from_their_end() -> None:
    manager = KVCacheManager(4, SIZE)
    tokens = list(range(12))
    table, _ = _filled(manager, tokens)
    blocks = table.blocks.copy()
    manager.release(table, tokens, 12)
    other = manager.new_table(())
    manager.extend(other, 0, 8)  # one block was never used, one must be evicted
    assert manager.num_evictions == 1 and blocks[2] not in manager.index
    assert manager.match(manager.index.keys(()), tokens, 12).num_tokens == 8
    audit_manager(manager, [other])


def test_nothing_is_kept_of_a_failed_table() -> None:
    manager = KVCacheManager(4, SIZE)
    table, _ = _filled(manager, [1, 2, 3])
    manager.release(table, [1, 2, 3], 3, keep=False)
    assert len(manager.index) == 0 and manager.pool.num_used == 0


def test_a_partial_block_that_a_fork_still_writes_to_is_not_published() -> None:
    manager = KVCacheManager(4, SIZE)
    table, _ = _filled(manager, [1, 2, 3])
    twin = manager.fork(table)
    manager.release(table, [1, 2, 3], 3)
    assert len(manager.index) == 0
    manager.release(twin, [1, 2, 3], 3)
    assert len(manager.index) == 1
    audit_manager(manager, [])


def test_forgetting_the_cache_spares_what_is_in_use() -> None:
    manager = KVCacheManager(8, SIZE)
    used, _ = _filled(manager, list(range(8)))
    freed, _ = _filled(manager, list(range(100, 108)))
    manager.release(freed, list(range(100, 108)), 8)
    assert manager.forget_free() == 2
    assert len(manager.index) == 2
    assert manager.match(manager.index.keys(()), list(range(8)), 8).num_tokens == 8
    audit_manager(manager, [used])


def test_a_collision_ends_publishing_and_nothing_else() -> None:
    manager = KVCacheManager(8, SIZE)
    manager.index.digest = lambda parent, content: bytes(16)
    one, _ = _filled(manager, list(range(8)))
    assert one.chain is None and len(manager.index) == 1
    two, _ = _filled(manager, list(range(50, 58)))
    assert (
        two.chain is None
        and manager.match(manager.index.keys(()), list(range(50, 58)), 8).num_tokens == 0
    )
    audit_manager(manager, [one, two])
    manager.release(two, list(range(50, 58)), 8)
    audit_manager(manager, [one])
