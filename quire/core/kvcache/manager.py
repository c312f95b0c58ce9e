"""The KV cache manager: block tables on top of the pool and the prefix index.

Owns allocation on demand, sharing by reference, copy-on-write, publishing of full blocks, merging
of identical ones and eviction. It says what changed (`TableChange`); it never builds plans, knows
no requests, and touches no tensor. Token ids here are ids of what stands at each position
(`Sequence.content_ids`): where these agree, so do keys and values.

Two rules keep shared memory honest. A full block is immutable, so any number of tables may name it.
A partial block has one
writer: a sequence that writes to a partial block that others reference as well gets a copy first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.common.numbers import ceil_div
from quire.core.kvcache.pool import BlockPool
from quire.core.kvcache.prefix import ChainKeys, Namespace, PrefixIndex, PrefixNode, keyed_digest
from quire.core.plan import BlockCopy


class BlockTable:
    """One sequence's blocks in logical order, and how far they are
    published in the prefix index."""

    __slots__ = ("blocks", "chain", "num_chained", "num_filled")

    def __init__(self, chain: PrefixNode | None) -> None:
        self.blocks: list[int] = []
        self.chain = chain
        """Node of the last published block; None where publishing has ended for this table."""
        self.num_chained = 0
        self.num_filled = 0
        """Slots that hold a token, or will at the end of the step in flight."""


class PrefixMatch(NamedTuple):
    """What the cache already holds of a sequence: whole blocks to share,
    and part of one more to copy."""

    nodes: tuple[PrefixNode, ...]
    partial: PrefixNode | None
    num_tokens: int


class TableChange(NamedTuple):
    """What an extension did to a table, for the plan."""

    appended: tuple[int, ...]
    replaced_index: int
    """Entry that now names another block (copy-on-write), or -1."""
    copy: BlockCopy | None


NO_MATCH = PrefixMatch((), None, 0)
UNCHANGED = TableChange((), -1, None)
"""No change at all; compare by identity."""


class KVCacheManager:
    """Blocks of `block_size` tokens out of a pool of `num_blocks`."""

    def __init__(
        self, num_blocks: int, block_size: int, *, digest_key: bytes = b"", caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size, keyed_digest(digest_key))
        self.num_unused_slots = 0
        """Slots of allocated blocks that hold no token yet,
        summed over tables (a shared partial block counts for each)."""
        self.num_copies = self.num_merges = self.num_evictions = 0

    # -- questions
    # ----------------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return blocks that `num_tokens` tokens fill or begin."""
        return ceil_div(num_tokens, self.block_size)

    def num_needed(self, table: BlockTable, start: int, end: int) -> int:
        """New blocks that `extend(table, start, end)` would take."""
        return max(0, self.num_blocks_for(end) - len(table.blocks)) + self._needs_copy(table, start)

    def match(self, keys: ChainKeys, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        """Return the longest cached prefix of `token_ids`, counted to the token,
        of at most `max_tokens` tokens."""
        if not self.caching or max_tokens <= 0:
            return NO_MATCH
        size, node, nodes = self.block_size, keys.root, []
        keys.extend_to(token_ids)
        for tokens, digest in zip(keys.tokens[: max_tokens // size], keys.digests, strict=False):
            child = self.index.child(node, tokens, digest)
            if child is None:
                break
            node = child
            nodes.append(child)
        start = len(nodes) * size
        partial, length = self.index.closest_child(
            node, tuple(token_ids[start : min(start + size, max_tokens)])
        )
        return PrefixMatch(tuple(nodes), partial, start + length)

    def num_free_in(self, match: PrefixMatch) -> int:
        """Return blocks of a match that no table references:
        taking them up uses free blocks without allocating."""
        counts = self.pool.ref_counts
        return sum(counts[node.block] == 0 for node in match.nodes)

    # -- changes
    # ----------------------------------------------------------------------------------------------

    def new_table(self, namespace: Namespace) -> BlockTable:
        """Return an empty table."""
        return BlockTable(self.index.root(namespace) if self.caching else None)

    def adopt(self, table: BlockTable, match: PrefixMatch) -> BlockCopy | None:
        """Fill an empty table from a match; the copy to make is of the partly matching block, if
        there is one.

        The copy's source may be evicted, or even handed out again, in the same step: copies read
        before anything writes.
        """
        assert not table.blocks
        for node in match.nodes:
            self.pool.share(node.block)
            table.blocks.append(node.block)
        if match.nodes:
            table.chain, table.num_chained = match.nodes[-1], len(match.nodes)
        table.num_filled = match.num_tokens
        num_copied = match.num_tokens - len(match.nodes) * self.block_size
        if num_copied == 0:
            return None
        assert match.partial is not None
        source = match.partial.block
        destination = self._take()
        table.blocks.append(destination)
        self.num_unused_slots += self.block_size - num_copied
        if source == destination:
            return None  # the partial block itself was next in line: it is taken over as it is
        self.num_copies += 1
        return BlockCopy(source, destination)

    def is_own(self, table: BlockTable, position: int) -> bool:
        """Return whether no other table names the block of a position, so that its slots may be
        written."""
        return self.pool.ref_counts[table.blocks[position // self.block_size]] == 1

    def fill_slot(self, table: BlockTable, position: int) -> bool:
        """Take the next slot of a block that is the table's own; False (and no change) where that
        needs a new block.

        What `extend(table, position, position + 1)` does in the most frequent case, at a fraction
        of the cost.
        """
        place, offset = divmod(position, self.block_size)
        if offset == 0 or self.pool.ref_counts[table.blocks[place]] != 1:
            return False
        self.num_unused_slots -= position + 1 - table.num_filled
        table.num_filled = position + 1
        return True

    def extend(self, table: BlockTable, start: int, end: int) -> TableChange:
        """Make the slots of positions [start, end) writable;
        the caller has checked `num_needed` against the pool."""
        num_new = self.num_blocks_for(end) - len(table.blocks)
        self.num_unused_slots -= end - table.num_filled
        table.num_filled = end
        must_copy = self._needs_copy(table, start)
        if num_new <= 0 and not must_copy:
            return UNCHANGED
        copy, index = None, -1
        if must_copy:
            index = start // self.block_size
            copy = BlockCopy(table.blocks[index], self._take())
            self.pool.release(copy.source, cached=copy.source in self.index)
            table.blocks[index] = copy.destination
            self.num_copies += 1
        appended = tuple(self._take() for _ in range(num_new))
        table.blocks.extend(appended)
        self.num_unused_slots += len(appended) * self.block_size
        return TableChange(appended, index, copy)

    def retract(self, table: BlockTable, end: int) -> None:
        """Void the slots from position `end` on, and give back the blocks that hold no token then:
        the last ones, which are the table's own."""
        self.num_unused_slots += table.num_filled - end
        table.num_filled = end
        while len(table.blocks) > self.num_blocks_for(end):
            self.pool.release(table.blocks.pop(), cached=False)
            self.num_unused_slots -= self.block_size

    def publish(
        self, table: BlockTable, keys: ChainKeys, token_ids: Sequence[int], num_computed: int
    ) -> list[int]:
        """Enter the blocks that are now full into the index.

        A block that is identical to a published one is merged with it; returns the table's entries
        that changed by that.
        """
        size = self.block_size
        merged: list[int] = []
        if table.chain is None or (table.num_chained + 1) * size > num_computed:
            return merged
        keys.extend_to(token_ids)
        while table.chain is not None and (table.num_chained + 1) * size <= num_computed:
            place = table.num_chained
            block, tokens, digest = table.blocks[place], keys.tokens[place], keys.digests[place]
            node = self.index.child(table.chain, tokens, digest)
            if node is None:
                node = self.index.insert_full(table.chain, tokens, digest, block)
            elif node.block != block:
                self.pool.share(node.block)
                table.blocks[place] = node.block
                self.pool.release(block, cached=False)
                self.num_merges += 1
                merged.append(place)
            table.chain = node
            table.num_chained += 1
        return merged

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same blocks, the last partial one included."""
        twin = BlockTable(table.chain)
        twin.blocks, twin.num_chained, twin.num_filled = (
            table.blocks.copy(),
            table.num_chained,
            table.num_filled,
        )
        for block in twin.blocks:
            self.pool.share(block)
        self.num_unused_slots += len(twin.blocks) * self.block_size - twin.num_filled
        return twin

    def release(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int, *, keep: bool = True
    ) -> None:
        """Give a table's blocks back, the last first, so that a chain is evicted from its end.

        With `keep` an unfinished last block is published too, for others to copy from. Without it
        the content is in doubt:
        nothing new is published, and what no other table references is forgotten.
        """
        self.num_unused_slots -= len(table.blocks) * self.block_size - table.num_filled
        if keep and table.chain is not None:
            self._publish_partial(table, token_ids, num_computed)
        for block in reversed(table.blocks):
            if not keep and self.pool.ref_counts[block] == 1:
                self.index.remove(block)
            self.pool.release(block, cached=block in self.index)
        table.blocks.clear()
        table.num_filled = 0

    def forget_free(self) -> int:
        """Unpublish every cached block that no table references; returns how many there were."""
        forgotten = [block for block in self.pool.free_blocks() if block in self.index]
        for block in forgotten:
            self.index.remove(block)
        return len(forgotten)

    # -- inside
    # ----------------------------------------------------------------------------------------------

    def _needs_copy(self, table: BlockTable, start: int) -> bool:
        place, offset = divmod(start, self.block_size)
        return offset != 0 and self.pool.ref_counts[table.blocks[place]] > 1

    def _publish_partial(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int
    ) -> None:
        start = table.num_chained * self.block_size
        tokens = tuple(token_ids[start:num_computed])
        if not 0 < len(tokens) < self.block_size:
            return
        block = table.blocks[table.num_chained]
        # A block that a fork still writes to must not be published: its owner would later publish
        # it as a full one.
        if self.pool.ref_counts[block] == 1:
            assert table.chain is not None
            self.index.insert_partial(table.chain, tokens, block)

    def _take(self) -> int:
        block = self.pool.take()
        if block in self.index:
            self.index.remove(block)
            self.num_evictions += 1
        return block
