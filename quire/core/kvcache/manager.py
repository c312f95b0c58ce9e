"""The KV cache manager: block tables on top of the pool and the prefix index.

Owns allocation on demand, sharing by reference, copy-on-write, publishing of full blocks, merging
of identical ones and eviction. It says what changed (`TableChange`); it never builds plans, knows
no requests, and touches no tensor. Token ids here are ids of what stands at each position
(`Sequence.content_ids`): where these agree, so do keys and values.

Two rules keep shared memory honest. A full block is immutable, so any number of tables may name it.
A partial block has one
writer: a sequence that writes to a partial block that others reference as well gets a copy first.

The layers of a model are in groups, and each place of a sequence has a block of every group. Groups
with a sliding window give back blocks behind it (`give_back`), so that what they hold does not grow
with the sequence. The blocks that admitted sequences have been promised could then not be counted
against free blocks: a block that two sequences reference may be given back by one of them without
becoming free. So every reference to a block of such a group counts as a block;
`num_extra_references` is how many more references there are than blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.common.kv_windows import kept_window
from quire.common.numbers import ceil_div
from quire.core.kvcache.pool import BlockPool
from quire.core.kvcache.prefix import (
    NO_BLOCK,
    ChainKeys,
    Namespace,
    PrefixIndex,
    PrefixNode,
    keyed_digest,
)
from quire.core.plan import BlockCopy


class BlockTable:
    """One sequence's blocks in logical order, and how far they are
    published in the prefix index."""

    __slots__ = ("blocks", "chain", "num_chained", "num_filled", "starts")

    def __init__(self, chain: PrefixNode | None, num_windows: int = 0) -> None:
        self.blocks: list[int] = []
        """Place by place, one of each group; NO_BLOCK where it was given back."""
        self.starts = [0] * num_windows
        """For each window: the first place that its groups have not given back."""
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
    """First of the entries that now name other blocks (copy-on-write), or -1."""
    copies: tuple[BlockCopy, ...]
    """One of each group, or none; their destinations are what those entries name."""


NO_MATCH = PrefixMatch((), None, 0)
UNCHANGED = TableChange((), -1, ())
"""No change at all; compare by identity."""


class KVCacheManager:
    """Blocks of `block_size` tokens out of a pool of `num_blocks`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        num_ahead: int = 0,
        digest_key: bytes = b"",
        caching: bool = True,
    ) -> None:
        """`windows` has each group's sliding window, None for attention to everything. At most
        `num_ahead` tokens of a sequence are in slots and not known to be computed."""
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size, keyed_digest(digest_key), windows)
        self.num_groups = len(windows)
        sizes = sorted({each for each in windows if each is not None})
        self._windows = tuple(
            (kept_window(size, block_size, num_ahead), _places_of(size, windows)) for size in sizes
        )
        """What each window keeps, and its groups."""
        self.has_windows = bool(self._windows)
        self._has_window = [window is not None for window in windows]
        self._num_full = windows.count(None)
        self.num_unused_slots = 0
        """Slots of allocated places that hold no token yet,
        summed over tables (a shared partial block counts for each)."""
        self.num_extra_references = 0
        self.num_copies = self.num_merges = self.num_evictions = 0

    # -- questions
    # ----------------------------------------------------------------------------------------------

    def num_places_for(self, num_tokens: int) -> int:
        """Return places that `num_tokens` tokens fill or begin."""
        return ceil_div(num_tokens, self.block_size)

    def num_places(self, table: BlockTable) -> int:
        """Return places that the table has, given back or not."""
        return len(table.blocks) // self.num_groups

    def num_needed(self, table: BlockTable, start: int, end: int) -> int:
        """New blocks that `extend(table, start, end)` would take."""
        num_groups = self.num_groups
        num_new = max(0, -(-end // self.block_size) * num_groups - len(table.blocks))
        return num_new + num_groups if self._needs_copy(table, start) else num_new

    def num_promised(self, table: BlockTable, num_places: int) -> int:
        """Return blocks that a sequence still has to be given until its table has `num_places`:
        those it lacks, but of groups with a window never more than these hold at once."""
        num_now = self.num_places(table)
        num_left = num_places - num_now
        total = self._num_full * num_left
        for (kept, groups), start in zip(self._windows, table.starts, strict=True):
            total += len(groups) * min(num_left, kept.max_places - (num_now - start))
        return total

    def num_wanted(self, match: PrefixMatch, num_places: int) -> int:
        """Return blocks that are no longer available once a sequence of `num_places` is admitted
        with a match: those it is promised, and those of the match that are free. A block of a group
        with a window counts also where another sequence references it."""
        num_matched = len(match.nodes)
        num_left = num_places - num_matched
        total = self._num_full * num_left
        counts = self.pool.ref_counts
        for group, has_window in enumerate(self._has_window):
            if not has_window:
                total += sum(counts[node.blocks[group]] == 0 for node in match.nodes)
        for kept, groups in self._windows:
            num_held = num_matched - kept.first_place(match.num_tokens)
            total += len(groups) * (num_held + min(num_left, kept.max_places - num_held))
        return total

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
        if self._windows:
            del nodes[self._num_usable(nodes) :]
            node = nodes[-1] if nodes else keys.root
        start = len(nodes) * size
        partial, length = self.index.closest_child(
            node, tuple(token_ids[start : min(start + size, max_tokens)])
        )
        return PrefixMatch(tuple(nodes), partial, start + length)

    def exclusive(self, table: BlockTable, num_computed: int) -> tuple[int, int]:
        """Return (blocks of a table that no other sequence references, tokens of which at most
        would have to be computed again if it were released). Where the last window is lost, all
        are."""
        counts = self.pool.ref_counts
        num_blocks = sum(counts[block] == 1 for block in table.blocks if block != NO_BLOCK)
        if num_blocks and self._windows:
            return num_blocks, num_computed
        num_tokens = ceil_div(num_blocks, self.num_groups) * self.block_size
        return num_blocks, min(num_tokens, num_computed)

    # -- changes
    # ----------------------------------------------------------------------------------------------

    def new_table(self, namespace: Namespace) -> BlockTable:
        """An empty table."""
        return BlockTable(self.index.root(namespace) if self.caching else None, len(self._windows))

    def adopt(self, table: BlockTable, match: PrefixMatch) -> tuple[BlockCopy, ...]:
        """Fill an empty table from a match; the copies to make are of the partly matching blocks,
        if there are any.

        A copy's source may be evicted, or even handed out again, in the same step: copies read
        before anything writes.
        """
        assert not table.blocks
        for node in match.nodes:
            table.blocks += node.blocks
        for number, (kept, groups) in enumerate(self._windows):
            table.starts[number] = kept.first_place(match.num_tokens)
            for place in range(table.starts[number]):
                for group in groups:
                    table.blocks[place * self.num_groups + group] = NO_BLOCK
        self._share_all(table.blocks)
        if match.nodes:
            table.chain, table.num_chained = match.nodes[-1], len(match.nodes)
        table.num_filled = match.num_tokens
        num_copied = match.num_tokens - len(match.nodes) * self.block_size
        if num_copied == 0:
            return ()
        assert match.partial is not None
        sources = match.partial.blocks.copy()
        destinations = [self._take() for _ in sources]
        table.blocks += destinations
        self.num_unused_slots += self.block_size - num_copied
        # A block that was next in line itself is taken over as it is.
        pairs = zip(sources, destinations, strict=True)
        copies = tuple(BlockCopy(*pair) for pair in pairs if pair[0] != pair[1])
        self.num_copies += len(copies)
        return copies

    def give_back(self, table: BlockTable, num_computed: int) -> list[int]:
        """Give back what is behind the windows once `num_computed` tokens are computed and, where
        they can be, published; returns the table's entries that name no block any more."""
        entries: list[int] = []
        for number, (kept, groups) in enumerate(self._windows):
            first = kept.first_place(num_computed)
            for place in range(table.starts[number], first):
                entries += [place * self.num_groups + group for group in groups]
            table.starts[number] = max(first, table.starts[number])
        for entry in entries:
            self._release(table.blocks[entry], entry)
            table.blocks[entry] = NO_BLOCK
        return entries

    def is_own(self, table: BlockTable, position: int) -> bool:
        """Whether no other table names the blocks of a position: its slots may be written."""
        return not self._is_shared(table, position // self.block_size)

    def fill_slot(self, table: BlockTable, position: int) -> bool:
        """Take the next slot of a block that is the table's own; False (and no change) where that
        needs a new block.

        What `extend(table, position, position + 1)` does in the most frequent case, at a fraction
        of the cost.
        """
        place, offset = divmod(position, self.block_size)
        if offset == 0 or self.pool.ref_counts[table.blocks[place * self.num_groups]] != 1:
            return False
        self.num_unused_slots -= position + 1 - table.num_filled
        table.num_filled = position + 1
        return True

    def extend(self, table: BlockTable, start: int, end: int) -> TableChange:
        """Make the slots of positions [start, end) writable;
        the caller has checked `num_needed` against the pool."""
        num_new = -(-end // self.block_size) * self.num_groups - len(table.blocks)
        self.num_unused_slots -= end - table.num_filled
        table.num_filled = end
        must_copy = self._needs_copy(table, start)
        if num_new <= 0 and not must_copy:
            return UNCHANGED
        copies: tuple[BlockCopy, ...] = ()
        index = -1
        if must_copy:
            index = start // self.block_size * self.num_groups
            copies = tuple(self._copied(table, index + group) for group in range(self.num_groups))
        appended = tuple(self._take() for _ in range(num_new))
        table.blocks.extend(appended)
        self.num_unused_slots += len(appended) // self.num_groups * self.block_size
        return TableChange(appended, index, copies)

    def retract(self, table: BlockTable, end: int) -> None:
        """Void the slots from position `end` on, and give back the blocks that hold no token then:
        the last ones, which are the table's own."""
        self.num_unused_slots += table.num_filled - end
        table.num_filled = end
        while self.num_places(table) > self.num_places_for(end):
            for _ in range(self.num_groups):
                self.pool.release(table.blocks.pop(), cached=False)
            self.num_unused_slots -= self.block_size

    def publish(
        self, table: BlockTable, keys: ChainKeys, token_ids: Sequence[int], num_computed: int
    ) -> list[int]:
        """Enter the blocks that are now full into the index.

        A block that is identical to a published one is merged with it; returns the table's entries
        that changed by that.
        """
        size, num_groups = self.block_size, self.num_groups
        merged: list[int] = []
        if table.chain is None or (table.num_chained + 1) * size > num_computed:
            return merged
        keys.extend_to(token_ids)
        while table.chain is not None and (table.num_chained + 1) * size <= num_computed:
            place = table.num_chained
            tokens, digest = keys.tokens[place], keys.digests[place]
            blocks = table.blocks[place * num_groups : (place + 1) * num_groups]
            node = self.index.child(table.chain, tokens, digest)
            if node is None:
                node = self.index.insert_full(table.chain, tokens, digest, blocks)
            elif node.blocks != blocks:
                merged += self._merge(table, place * num_groups, node)
            table.chain = node
            table.num_chained += 1
        return merged

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same blocks, the last partial one included."""
        twin = BlockTable(table.chain)
        twin.blocks, twin.starts = table.blocks.copy(), table.starts.copy()
        twin.num_chained, twin.num_filled = table.num_chained, table.num_filled
        self._share_all(twin.blocks)
        self.num_unused_slots += self.num_places(twin) * self.block_size - twin.num_filled
        return twin

    def release(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int, *, keep: bool = True
    ) -> None:
        """Give a table's blocks back, the last first, so that a chain is evicted from its end.

        With `keep` an unfinished last block is published too, for others to copy from. Without it
        the content is in doubt:
        nothing new is published, and what no other table references is forgotten.
        """
        self.num_unused_slots -= self.num_places(table) * self.block_size - table.num_filled
        if keep and table.chain is not None:
            self._publish_partial(table, token_ids, num_computed)
        for entry in range(len(table.blocks) - 1, -1, -1):
            block = table.blocks[entry]
            if block == NO_BLOCK:
                continue
            if not keep and self.pool.ref_counts[block] == 1:
                self._distrust(block)
            self._release(block, entry)
        table.blocks.clear()
        table.starts = [0] * len(table.starts)
        table.num_filled = 0

    def rekey(self, digest_key: bytes) -> None:
        """Forget all that is cached, and name what comes otherwise, so that nothing of before is
        found again, wherever it is kept. No table has blocks; their keys are void."""
        assert self.pool.num_used == 0, "blocks are in use"
        self.forget_free()
        self.index.digest = keyed_digest(digest_key)

    def forget_free(self) -> int:
        """Unpublish every cached block that no table references; returns how many there were."""
        forgotten = [block for block in self.pool.free_blocks() if block in self.index]
        for block in forgotten:
            self.index.remove(block)
            self.pool.unkeep(block)
        return len(forgotten)

    def forget_node(self, node: PrefixNode) -> int:
        """Unpublish a node, here and wherever it is kept, unless a table references it or others
        hang on it; return how many blocks it had."""
        blocks = [block for block in node.blocks if block != NO_BLOCK]
        if not blocks or node.children or any(self.pool.ref_counts[block] for block in blocks):
            return 0
        for watcher in self.index.watchers if node.digest else ():
            watcher.distrusted(node)
        self.index.drop(node)
        return len(blocks)

    # -- inside
    # ----------------------------------------------------------------------------------------------

    def _needs_copy(self, table: BlockTable, start: int) -> bool:
        place, offset = divmod(start, self.block_size)
        return offset != 0 and self.pool.ref_counts[table.blocks[place * self.num_groups]] > 1

    def _is_shared(self, table: BlockTable, place: int) -> bool:
        # Blocks of a place that is not full are taken, forked and copied together.
        return self.pool.ref_counts[table.blocks[place * self.num_groups]] > 1

    def _num_usable(self, nodes: Sequence[PrefixNode]) -> int:
        """How many of the nodes a sequence can go on behind: the longest prefix that ends with
        every window's blocks."""
        end = len(nodes)
        while end:
            num_tokens = end * self.block_size
            gaps = (
                place
                for kept, groups in self._windows
                for place in range(end - 1, kept.first_place(num_tokens) - 1, -1)
                if any(nodes[place].blocks[group] == NO_BLOCK for group in groups)
            )
            gap = next(gaps, None)
            if gap is None:
                break
            end = gap
        return end

    def _copied(self, table: BlockTable, entry: int) -> BlockCopy:
        """Give a table a block of its own in place of a shared one."""
        copy = BlockCopy(table.blocks[entry], self._take())
        self._release(copy.source, entry)
        table.blocks[entry] = copy.destination
        self.num_copies += 1
        return copy

    def _merge(self, table: BlockTable, first: int, node: PrefixNode) -> list[int]:
        """Have a place's entries, from `first` on, name a node's blocks; returns those that
        changed. What the node lacks it gets from the table."""
        merged = []
        for group, block in enumerate(node.blocks):
            own = table.blocks[first + group]
            if block == NO_BLOCK:
                self.index.restore(node, group, own)
            elif block != own:
                self._share(block, group)
                self._release(own, group)
                table.blocks[first + group] = block
                merged.append(first + group)
        self.num_merges += len(merged)
        return merged

    def _share_all(self, blocks: Sequence[int]) -> None:
        """Add an owner to what a table's entries name."""
        for entry, block in enumerate(blocks):
            if block != NO_BLOCK:
                self._share(block, entry)

    def _share(self, block: int, entry: int) -> None:
        """Add an owner to a block at an entry of a table."""
        if self._has_window[entry % self.num_groups] and self.pool.ref_counts[block]:
            self.num_extra_references += 1
        self.pool.share(block)

    def _release(self, block: int, entry: int) -> None:
        """Drop an owner of a block at an entry of a table."""
        if self._has_window[entry % self.num_groups] and self.pool.ref_counts[block] > 1:
            self.num_extra_references -= 1
        self.pool.release(block, cached=block in self.index)

    def _publish_partial(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int
    ) -> None:
        start = table.num_chained * self.block_size
        tokens = tuple(token_ids[start:num_computed])
        if not 0 < len(tokens) < self.block_size:
            return
        # A block that a fork still writes to must not be published: its owner would later publish
        # it as a full one.
        if not self._is_shared(table, table.num_chained):
            assert table.chain is not None
            first = table.num_chained * self.num_groups
            blocks = table.blocks[first : first + self.num_groups]
            self.index.insert_partial(table.chain, tokens, blocks)

    def _distrust(self, block: int) -> None:
        """Forget a block whose content is in doubt."""
        node = self.index.node_of(block)
        for each in () if node is None else self.index.below(node):
            for watcher in self.index.watchers:
                watcher.distrusted(each)
        self.index.remove(block)

    def _take(self) -> int:
        block = self.pool.take()
        if block in self.index:
            self.index.remove(block)
            self.num_evictions += 1
        return block


def _places_of(window: int, windows: Sequence[int | None]) -> tuple[int, ...]:
    """Groups with this window."""
    return tuple(group for group, each in enumerate(windows) if each == window)
