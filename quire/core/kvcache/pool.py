"""The block pool: which physical blocks are free, and how many owners each of the others has.

Owns reference counts and the free list; never knows what a block contains. Every operation is O(1).
The free blocks are two intrusive doubly linked lists in two flat arrays, each with a sentinel
behind the last block: those that are to be kept as long as there are others, and the others.
"""

from __future__ import annotations


class BlockPool:
    """`num_blocks` physical blocks, all free at first.

    A block whose content is still worth something (`cached`) is freed to the tail of the list and
    so evicted last, in least recently used order; a worthless one is freed to the head and so
    reused first, while it is warm in the CPU's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts: list[int] = [0] * num_blocks
        self._is_kept = [False] * num_blocks
        sentinel, keeping = num_blocks, num_blocks + 1
        self._next: list[int] = [*range(1, num_blocks + 1), 0, keeping]
        self._prev: list[int] = [sentinel, *range(num_blocks), keeping]

    @property
    def num_used(self) -> int:
        """Blocks that at least one owner references."""
        return self.num_blocks - self.num_free

    def take(self) -> int:
        """Hand out the next free block with one owner.
        The caller forgets what the block contained."""
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            block = self._next[self.num_blocks + 1]
            assert block <= self.num_blocks, (
                "take() from an empty pool: the caller did not check num_free"
            )
            self._is_kept[block] = False
        self._unlink(block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add an owner; a free block (a cached one, found again) leaves the free list."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
        self.ref_counts[block] += 1

    def release(self, block: int, *, cached: bool) -> None:
        """Drop an owner; the last one frees the block."""
        count = self.ref_counts[block] - 1
        assert count >= 0, f"block {block} released more often than it was taken"
        self.ref_counts[block] = count
        if count == 0 and cached:
            self._link(block, before=self._end_of(block))
        elif count == 0:
            self._is_kept[block] = False
            self._link(block, before=self._next[self.num_blocks])

    def keep(self, block: int) -> None:
        """Have a cached block handed out after all that are not kept, until it is handed out or
        `unkeep`; a free one after those that were kept before it."""
        self._is_kept[block] = True
        self._move(block)

    def unkeep(self, block: int) -> None:
        """Treat a block as others again: as one that was freed just now."""
        if self._is_kept[block]:
            self._is_kept[block] = False
            self._move(block)

    def is_kept(self, block: int) -> bool:
        """Whether a block is handed out last."""
        return self._is_kept[block]

    def free_blocks(self) -> list[int]:
        """Return free blocks in the order in which they will be handed out. O(num_free):
        for checks and pictures only."""
        blocks: list[int] = []
        for sentinel in (self.num_blocks, self.num_blocks + 1):
            block = self._next[sentinel]
            while block != sentinel:
                blocks.append(block)
                block = self._next[block]
        return blocks

    def _end_of(self, block: int) -> int:
        """Return the sentinel of the list that a free cached block belongs to."""
        return self.num_blocks + self._is_kept[block]

    def _move(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, before=self._end_of(block))

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, *, before: int) -> None:
        previous = self._prev[before]
        self._next[previous] = self._prev[before] = block
        self._prev[block], self._next[block] = previous, before
        self.num_free += 1
