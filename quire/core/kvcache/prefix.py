"""The prefix index: which cached blocks continue which prefix.

A tree. A node is one block's tokens after its parent's, and the blocks that hold them, one of each
group of layers; a full node is found by its 128-bit digest, chained over everything before it, and
believed only after its tokens and its parent have been compared, so that a collision costs a miss
and never another prompt's KV. Siblings are also kept sorted by their tokens, which makes the
longest common prefix with any of them a binary search: hits are counted to the token, and a partly
matching block is reused by copying it.

The index names blocks but owns none: reference counts are the pool's. A node can do without the
blocks of groups with a sliding window: a prefix is found again where these groups have the blocks
of its last window. A node that has lost all of its blocks stays while others hang on it. In a
group without a window a child is always evicted before its parent, because a sequence that
references a block references everything before it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from quire.core.content import content_bytes
from quire.core.kvcache.elsewhere import StoredElsewhere
from quire.core.plan import TokenLogprobs

Namespace = tuple[str, ...]
"""What must agree before KV may be shared besides the tokens: tenant salt, adapter, KV dtype."""

Digest = Callable[[bytes, bytes], bytes]
"""(parent's digest, content) -> digest of 16 bytes."""

NO_BLOCK = -1
"""In the place of a block that was given back, or evicted."""

ScoringKey = tuple[object, ...]
"""How prompt log-probabilities were requested; records are reused only where this agrees."""


def keyed_digest(key: bytes) -> Digest:
    """BLAKE2b with a 128-bit output, keyed so that no one outside the process can search
    for collisions (RFC 7693)."""

    keyed = hashlib.blake2b(digest_size=16, key=key)

    def digest(parent: bytes, content: bytes) -> bytes:
        # the key's own block is hashed once, which is more than half of the work
        state = keyed.copy()
        state.update(parent + content)
        return state.digest()

    return digest


class PrefixNode:
    """The cached blocks of one place (or, without a parent, the root of a namespace)."""

    __slots__ = (
        "blocks",
        "children",
        "digest",
        "namespace",
        "parent",
        "place",
        "records",
        "scoring",
        "tokens",
    )

    def __init__(
        self, parent: PrefixNode | None, tokens: tuple[int, ...], digest: bytes, blocks: list[int]
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.digest = digest
        self.blocks = blocks
        """Of each group; NO_BLOCK where it has none."""
        self.namespace: Namespace = parent.namespace if parent is not None else ()
        self.place: int = parent.place + 1 if parent is not None else -1
        """Blocks before it in its sequences."""
        self.children: list[PrefixNode] = []
        self.records: tuple[TokenLogprobs | None, ...] | None = None
        self.scoring: ScoringKey | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every group has its block."""
        return NO_BLOCK not in self.blocks

    @property
    def is_empty(self) -> bool:
        """Whether no group has its block."""
        return self.blocks.count(NO_BLOCK) == len(self.blocks)


def _tokens_of(node: PrefixNode) -> tuple[int, ...]:
    return node.tokens


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading tokens agree."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


class ChainKeys:
    """The content keys (tokens, digest) of one sequence's full blocks, each computed once."""

    __slots__ = ("_digest", "block_size", "digests", "root", "tokens")

    def __init__(self, root: PrefixNode, block_size: int, digest: Digest) -> None:
        self.root = root
        self.block_size = block_size
        self.tokens: list[tuple[int, ...]] = []
        self.digests: list[bytes] = []
        self._digest = digest

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Compute the keys of every block that `token_ids` (the whole sequence so far)
        now fills."""
        size, first = self.block_size, len(self.tokens) * self.block_size
        if first + size > len(token_ids):
            return
        new = tuple(token_ids[first:])
        digest = self.digests[-1] if self.digests else self.root.digest
        for place in range(0, len(new) // size * size, size):
            tokens = new[place : place + size]
            digest = self._digest(digest, content_bytes(tokens))
            self.tokens.append(tokens)
            self.digests.append(digest)

    def copy(self) -> ChainKeys:
        """Keys of a fork: the same so far, growing apart from here."""
        twin = ChainKeys(self.root, self.block_size, self._digest)
        twin.tokens, twin.digests = self.tokens.copy(), self.digests.copy()
        return twin


class IndexWatcher(Protocol):
    """Hears of what could be kept elsewhere, too."""

    def published(self, node: PrefixNode) -> None:
        """Full blocks have been entered, complete and computed."""
        ...

    def distrusted(self, node: PrefixNode) -> None:
        """What the node holds, or held, is not to be found again, wherever it is kept: a sequence
        that computed on it has failed, or its owner wants it forgotten."""
        ...

    def forgotten(self, node: PrefixNode) -> None:
        """A full node is about to leave the index, with the blocks that it has."""
        ...


class PrefixIndex:
    """All cached blocks of one pool."""

    def __init__(
        self, block_size: int, digest: Digest, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        """`windows` has each group's sliding window, None for attention to everything."""
        self.block_size = block_size
        self.windows = windows
        self.digest = digest
        self._roots: dict[Namespace, PrefixNode] = {}
        self._by_digest: dict[bytes, PrefixNode] = {}
        self._by_block: dict[int, PrefixNode] = {}
        self.changes: list[tuple[int, tuple[int, ...]]] | None = None
        """For a reader that follows the index and empties this: (block, its tokens) of each block
        that is published, and (~block, its tokens) of each that is forgotten. None: there is no
        reader.
        """
        self.watchers: list[IndexWatcher] = []
        self.elsewhere = StoredElsewhere()
        """What tiers below the pool have of the same digests."""
        self.is_placing = False
        """Whether what is published comes from elsewhere, and no plan has written it yet."""

    @property
    def num_full(self) -> int:
        """Nodes that are full."""
        return len(self._by_digest)

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def nodes(self) -> Iterator[PrefixNode]:
        """Return every node but the roots, parents first."""
        pending = list(self._roots.values())
        while pending:
            children = pending.pop().children
            yield from children
            pending.extend(children)

    def below(self, node: PrefixNode) -> Iterator[PrefixNode]:
        """Return a node and all that continue it, parents first, but for partly filled ones."""
        pending = [node]
        while pending:
            each = pending.pop()
            pending.extend(each.children)
            if each.digest:
                yield each

    def node_of(self, block: int) -> PrefixNode | None:
        """Return the node that `block` holds, if it is cached."""
        return self._by_block.get(block)

    def root(self, namespace: Namespace) -> PrefixNode:
        """Return the empty prefix of a namespace. Kept by the index only while
        something is cached below it."""
        known = self._roots.get(namespace)
        if known is not None:
            return known
        root = PrefixNode(None, (), self.digest(b"", repr(namespace).encode()), [])
        root.namespace = namespace
        return root

    def keys(self, namespace: Namespace) -> ChainKeys:
        """Fresh keys for a sequence in `namespace`."""
        return ChainKeys(self.root(namespace), self.block_size, self.digest)

    def child(
        self, parent: PrefixNode, tokens: tuple[int, ...], digest: bytes
    ) -> PrefixNode | None:
        """The full node that continues `parent` with exactly `tokens`; compared,
        not merely looked up."""
        node = self._by_digest.get(digest)
        if node is None or node.tokens != tokens or node.parent is not self._live(parent):
            return None
        return node

    def closest_child(
        self, parent: PrefixNode, tokens: tuple[int, ...]
    ) -> tuple[PrefixNode | None, int]:
        """The child that shares the longest prefix with `tokens`, of those that have all their
        blocks, and that prefix's length."""
        children = self._live(parent).children
        place = bisect_left(children, tokens, key=_tokens_of)
        best, best_len = None, 0
        for node in children[max(place - 1, 0) : place + 1]:
            length = common_prefix_len(node.tokens, tokens)
            if length > best_len and node.is_complete:
                best, best_len = node, length
        return best, best_len

    def insert_full(
        self, parent: PrefixNode, tokens: tuple[int, ...], digest: bytes, blocks: list[int]
    ) -> PrefixNode | None:
        """Publish full blocks, one of each group; None where their digest is taken by different
        content (they then stay uncached)."""
        if digest in self._by_digest:
            return None
        node = self._attach(parent, tokens, digest, blocks)
        self._by_digest[digest] = node
        for watcher in self.watchers:
            watcher.published(node)
        return node

    def insert_partial(
        self, parent: PrefixNode, tokens: tuple[int, ...], blocks: list[int]
    ) -> bool:
        """Publish unfinished blocks, to be copied from;
        False where a sibling already covers their tokens."""
        if self.closest_child(parent, tokens)[1] == len(tokens):
            return False
        self._attach(parent, tokens, b"", blocks)
        return True

    def restore(self, node: PrefixNode, group: int, block: int) -> None:
        """Give a node a block that it had lost and that has been computed again."""
        assert node.blocks[group] == NO_BLOCK
        node.blocks[group] = block
        self._enter(node, block)

    def remove(self, block: int) -> None:
        """Forget a block that is about to be overwritten, and what is worth nothing without it:
        all that continued it, unless its group has a window."""
        node = self._by_block.get(block)
        if node is None:
            return
        group = node.blocks.index(block)
        if self.windows[group] is not None and node.digest:
            self._forget(node, group)
        else:
            self._detach(node)
            assert node.parent is not None
            node = node.parent
        self._prune(node)

    def drop(self, node: PrefixNode) -> None:
        """Forget a node that nothing continues."""
        assert not node.children and node.parent is not None
        self._detach(node)
        self._prune(node.parent)

    def _prune(self, node: PrefixNode) -> None:
        """Forget a node that is good for nothing, and those before it that are only there for
        its sake."""
        while node.parent is not None and not node.children and node.is_empty:
            self._detach(node)
            node = node.parent

    def _forget(self, node: PrefixNode, group: int) -> None:
        block = node.blocks[group]
        if block == NO_BLOCK:
            return
        node.blocks[group] = NO_BLOCK
        del self._by_block[block]
        if self.changes is not None:
            self.changes.append((~block, node.tokens))

    def _detach(self, node: PrefixNode) -> None:
        """Forget a node with all its blocks, and whatever continued it."""
        for child in list(node.children):
            self._detach(child)
        is_full = self._by_digest.get(node.digest) is node
        for watcher in self.watchers if is_full else ():
            watcher.forgotten(node)
        for group in range(len(node.blocks)):
            self._forget(node, group)
        if is_full:
            del self._by_digest[node.digest]
        parent = node.parent
        assert parent is not None
        siblings = parent.children
        place = bisect_left(siblings, node.tokens, key=_tokens_of)
        assert siblings[place] is node
        del siblings[place]
        if parent.parent is None and not siblings:
            self._roots.pop(parent.namespace, None)

    def _attach(
        self, parent: PrefixNode, tokens: tuple[int, ...], digest: bytes, blocks: list[int]
    ) -> PrefixNode:
        parent = self._live(parent)
        if parent.parent is None:
            self._roots[parent.namespace] = parent
        node = PrefixNode(parent, tokens, digest, blocks)
        children = parent.children
        children.insert(bisect_left(children, tokens, key=_tokens_of) if children else 0, node)
        for block in blocks:
            self._enter(node, block)
        return node

    def _enter(self, node: PrefixNode, block: int) -> None:
        assert block not in self._by_block, f"block {block} is already cached"
        self._by_block[block] = node
        if self.changes is not None:
            self.changes.append((block, node.tokens))

    def _live(self, parent: PrefixNode) -> PrefixNode:
        # A namespace's root may have been dropped and made anew since the caller got hold of it.
        return self._roots.get(parent.namespace, parent) if parent.parent is None else parent
