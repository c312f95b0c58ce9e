"""Blocks that come from elsewhere, put into the pool as if a sequence had computed them: a table
that grows, is published and released.

The caller orders that they be written, in the plan that is made next. Until then the index says
that it is placing, so that no watcher has them read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from quire.core.kvcache.manager import BlockTable, PrefixMatch
from quire.core.kvcache.prefix import NO_BLOCK, ChainKeys, PrefixIndex, PrefixNode
from quire.core.scheduler.resources import KVBlocks


class Placed(NamedTuple):
    """What has become part of the index."""

    first: int
    """The first place."""
    blocks: list[tuple[int, ...]]
    """Of each place: one of each group, NO_BLOCK where there is nothing to write."""
    nodes: list[PrefixNode]


def place_blocks(
    blocks: KVBlocks, keys: ChainKeys, first: int, end: int, starts: Sequence[int] | None = None
) -> Placed:
    """Take blocks for places from `first` up to `end`, as far as there are any and the index has
    what stands before them; no places where it has not. `starts` are the first places that there is
    something of, for each group; by default there is of all."""
    manager = blocks.manager
    content_ids = list(chain(*keys.tokens[:end]))
    match = manager.match(keys, content_ids, len(content_ids))
    found = len(match.nodes)
    placed = Placed(found, [], [])
    if not first <= found < end:
        return placed
    table = manager.new_table(keys.root.namespace)
    manager.adopt(table, PrefixMatch(match.nodes, None, found * keys.block_size))
    index = manager.index
    index.is_placing = True
    try:
        _grow(blocks, table, keys, content_ids, placed, starts or (0,) * manager.num_groups)
    finally:
        index.is_placing = False
    manager.release(table, content_ids, table.num_filled)
    return placed


def _grow(
    blocks: KVBlocks,
    table: BlockTable,
    keys: ChainKeys,
    content_ids: list[int],
    placed: Placed,
    starts: Sequence[int],
) -> None:
    """Extend a table place by place up to the end of `content_ids`."""
    manager, size = blocks.manager, keys.block_size
    absent: list[int] = []
    for start in range(table.num_filled, len(content_ids), size):
        number = start // size
        if manager.num_needed(table, start, start + size) > blocks.num_available:
            break
        appended = manager.extend(table, start, start + size).appended
        manager.publish(table, keys, content_ids, start + size)
        _take_back(manager.index, absent)  # which now has a child, and stays as its parent
        is_there = [number >= each for each in starts]
        written = list(zip(appended, is_there, strict=True))
        placed.blocks.append(tuple(block if there else NO_BLOCK for block, there in written))
        node = table.chain
        if node is None:  # the digest is taken by other content
            break
        absent = [block for block, there in written if not there and block in node.blocks]
        placed.nodes.append(node)
        manager.give_back(table, start + size)
    _take_back(manager.index, absent)


def _take_back(index: PrefixIndex, absent: list[int]) -> None:
    """Have nodes do without blocks that nothing is written into."""
    for block in absent:
        index.remove(block)


def forget(index: PrefixIndex, nodes: Sequence[PrefixNode]) -> None:
    """Take back nodes whose blocks were perhaps never written."""
    for node in nodes:
        for block in node.blocks:
            if block != NO_BLOCK and index.node_of(block) is node:
                index.remove(block)
