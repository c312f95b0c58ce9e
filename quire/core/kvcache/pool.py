"""The block pool: which physical blocks are free, and how many owners each of the others has.

Owns reference counts and the free list; never knows what a block contains. Every operation is O(1).
The free list is an intrusive doubly linked list in two flat arrays, with one sentinel behind the
last block.
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
        sentinel = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [sentinel, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        """Blocks that at least one owner references."""
        return self.num_blocks - self.num_free

    def take(self) -> int:
        """Hand out the next free block with one owner.
        The caller forgets what the block contained."""
        block = self._next[self.num_blocks]
        assert block != self.num_blocks, (
            "take() from an empty pool: the caller did not check num_free"
        )
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
        if count == 0:
            self._link(block, before=self.num_blocks if cached else self._next[self.num_blocks])

    def free_blocks(self) -> list[int]:
        """Return free blocks in the order in which they will be handed out. O(num_free):
        for checks and pictures only."""
        blocks, block = [], self._next[self.num_blocks]
        while block != self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, *, before: int) -> None:
        previous = self._prev[before]
        self._next[previous] = self._prev[before] = block
        self._prev[block], self._next[block] = previous, before
        self.num_free += 1
