"""The block pool: reference counts and the order in which blocks are handed out."""

import pytest

from quire.core.kvcache.audit import audit_pool
from quire.core.kvcache.pool import BlockPool


def test_all_blocks_are_handed_out_once_each() -> None:
    pool = BlockPool(5)
    taken = [pool.take() for _ in range(5)]
    assert sorted(taken) == list(range(5))
    assert pool.num_free == 0 and pool.num_used == 5
    with pytest.raises(AssertionError, match="empty pool"):
        pool.take()
    audit_pool(pool)


def test_worthless_blocks_are_reused_first_and_cached_ones_in_least_recently_used_order() -> None:
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(4)]
    pool.release(blocks[2], cached=True)
    pool.release(blocks[0], cached=True)
    pool.release(blocks[1], cached=False)
    assert pool.free_blocks() == [blocks[1], blocks[2], blocks[0]]
    audit_pool(pool)


def test_a_shared_block_is_free_only_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.share(block)
    pool.release(block, cached=False)
    assert pool.num_used == 1
    pool.release(block, cached=False)
    assert pool.num_used == 0
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block, cached=False)


def test_a_free_cached_block_can_be_found_again() -> None:
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    pool.release(first, cached=True)
    pool.release(second, cached=True)
    pool.share(first)
    assert pool.ref_counts[first] == 1 and first not in pool.free_blocks()
    audit_pool(pool)
