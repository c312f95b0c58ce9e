"""The KV bookkeeping against a model of the memory: whatever is done in whatever order, every table
reads back its tokens.

The model writes tokens into slots as a worker would and knows nothing of references or digests.
Groups of layers with a window see the last tokens alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.kvcache.audit import audit_kept, audit_manager
from quire.core.kvcache.events import KVEventLog
from quire.core.kvcache.kept import KeptNodes
from quire.core.kvcache.manager import BlockTable, KVCacheManager
from quire.core.kvcache.prefix import NO_BLOCK, ChainKeys, PrefixIndex, PrefixNode
from quire.core.plan import BlockCopy

_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@dataclass(eq=False)
class _Owner:
    """A table with the tokens that it must read back."""

    table: BlockTable
    keys: ChainKeys
    tokens: list[int]


class AllocatorMachine(RuleBasedStateMachine):
    """Tables come, grow, fork, publish and go, in a pool of a few blocks."""

    @initialize(
        num_blocks=st.integers(1, 12),
        size=st.integers(1, 4),
        digest=st.sampled_from(("keyed", "colliding")),
        windows=st.sampled_from(((None,), (None,), (2,), (5,), (None, 3), (None, 1, 4))),
    )
    def start(
        self, num_blocks: int, size: int, digest: str, windows: tuple[int | None, ...]
    ) -> None:
        num_blocks *= len(windows)
        self.manager = KVCacheManager(num_blocks, size, windows=windows, num_ahead=9)
        if digest == "colliding":
            self.manager.index = PrefixIndex(
                size, lambda parent, content: bytes([sum(parent + content) % 3]) * 16, windows
            )
        self.memory: list[list[int | None]] = [[None] * size for _ in range(num_blocks)]
        self.owners: list[_Owner] = []
        self.now, self.kept = 0.0, KeptNodes(self.manager.pool)
        self.log = KVEventLog("log", max_blocks=12)
        self.log.follow(self.manager.index)
        self.manager.index.watchers.append(self)
        self.mirror, self.num_read = set[bytes](), 0

    @rule(tokens=_TOKENS)
    def admit(self, tokens: list[int]) -> None:
        manager = self.manager
        keys = manager.index.keys(())
        match = manager.match(keys, tokens, len(tokens) - 1)
        num_wanted = manager.num_wanted(match, manager.num_places_for(len(tokens)))
        if num_wanted > manager.pool.num_free - manager.num_extra_references:
            return
        owner = _Owner(manager.new_table(()), keys, tokens)
        self._apply(manager.adopt(owner.table, match))
        self._write(owner, match.num_tokens, len(tokens))
        self.owners.append(owner)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), tokens=_TOKENS)
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        owner = self._pick(data)
        start, end = len(owner.tokens), len(owner.tokens) + len(tokens)
        if self.manager.num_needed(owner.table, start, end) <= self.manager.pool.num_free:
            owner.tokens = owner.tokens + tokens
            self._write(owner, start, end)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), token=st.integers(0, 2))
    def fill_one_slot(self, data: st.DataObject, token: int) -> None:
        owner = self._pick(data)
        position = len(owner.tokens)
        if self.manager.fill_slot(owner.table, position):
            owner.tokens = [*owner.tokens, token]
            self._set(owner, position, token)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        owner = self._pick(data)
        self.manager.publish(owner.table, owner.keys, owner.tokens, len(owner.tokens))
        num_free = self.manager.pool.num_free - self.manager.num_extra_references
        entries = self.manager.give_back(owner.table, len(owner.tokens))
        now = self.manager.pool.num_free - self.manager.num_extra_references
        assert now == num_free + len(entries), "each reference counts as a block"

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        owner = self._pick(data)
        self.manager.publish(owner.table, owner.keys, owner.tokens, len(owner.tokens))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        owner = self._pick(data)
        self.manager.publish(owner.table, owner.keys, owner.tokens, len(owner.tokens))
        self.owners.append(
            _Owner(self.manager.fork(owner.table), owner.keys.copy(), owner.tokens.copy())
        )

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        owner = self._pick(data)
        if keep:
            self.manager.publish(owner.table, owner.keys, owner.tokens, len(owner.tokens))
        self.manager.release(owner.table, owner.tokens, len(owner.tokens), keep=keep)
        self.owners.remove(owner)

    @rule()
    def forget(self) -> None:
        self.manager.forget_free()

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), tenant=st.sampled_from("ab"), keep_s=st.integers(1, 5))
    def keep(self, data: st.DataObject, tenant: str, keep_s: int) -> None:
        owner, nodes = self._pick(data), list[PrefixNode]()
        node = owner.keys.root
        for tokens, digest in zip(owner.keys.tokens, owner.keys.digests, strict=True):
            child = self.manager.index.child(node, tokens, digest)
            if child is None:
                break
            nodes.append(child)
            node = child
        self.kept.keep(nodes, tenant, self.now + keep_s)

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0
        self.kept.expire(self.now)

    @rule(data=st.data())
    def forget_one(self, data: st.DataObject) -> None:
        nodes = list(self.manager.index.nodes())
        if nodes:
            self.manager.forget_node(data.draw(st.sampled_from(nodes), label="node"))

    @rule()
    def read_events(self) -> None:
        """Whoever follows the events knows what is cached, also after gaps."""
        batch = self.log.read("log", self.num_read)
        assert batch.is_snapshot or batch.last == self.num_read + len(batch.events)
        if batch.is_snapshot:
            self.mirror.clear()
        for event in batch.events:
            if event.kind == "stored":
                assert not event.parent or event.parent in self.mirror
                self.mirror.update(event.digests)
            elif event.kind == "removed":
                self.mirror.difference_update(event.digests)
            else:
                self.mirror.clear()
        self.num_read = batch.last
        assert self.mirror == {node.digest for node in self.manager.index.nodes() if node.digest}

    def published(self, node: PrefixNode) -> None:
        """Do nothing: see `IndexWatcher`."""

    def distrusted(self, node: PrefixNode) -> None:
        """Do nothing."""

    def forgotten(self, node: PrefixNode) -> None:
        """Tell what is kept of it."""
        self.kept.forget(node, is_eviction=True)

    @invariant()
    def everything_adds_up(self) -> None:
        audit_manager(self.manager, [owner.table for owner in self.owners])
        audit_kept(self.kept, self.manager)

    @invariant()
    def every_table_reads_back_its_tokens(self) -> None:
        """Those that its next token sees."""
        windows, size = self.manager.index.windows, self.manager.block_size
        for owner in self.owners:
            end = len(owner.tokens)
            for group, window in enumerate(windows):
                for position in range(0 if window is None else max(0, end + 1 - window), end):
                    block = owner.table.blocks[position // size * len(windows) + group]
                    assert block >= 0, f"position {position} of group {group} was given back"
                    assert self.memory[block][position % size] == owner.tokens[position]

    @invariant()
    def every_cached_block_holds_what_it_promises(self) -> None:
        for node in self.manager.index.nodes():
            for block in node.blocks:
                if block != NO_BLOCK:
                    assert tuple(self.memory[block][: len(node.tokens)]) == node.tokens

    def _pick(self, data: st.DataObject) -> _Owner:
        return self.owners[data.draw(st.integers(0, len(self.owners) - 1), label="owner")]

    def _write(self, owner: _Owner, start: int, end: int) -> None:
        change = self.manager.extend(owner.table, start, end)
        self._apply(change.copies)
        for position in range(start, end):
            self._set(owner, position, owner.tokens[position])

    def _set(self, owner: _Owner, position: int, token: int) -> None:
        place, offset = divmod(position, self.manager.block_size)
        first = place * self.manager.num_groups
        for block in owner.table.blocks[first : first + self.manager.num_groups]:
            self.memory[block][offset] = token

    def _apply(self, copies: tuple[BlockCopy, ...]) -> None:
        held = [self.memory[copy.source].copy() for copy in copies]
        for copy, tokens in zip(copies, held, strict=True):
            self.memory[copy.destination] = tokens


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(
    max_examples=int(os.environ.get("QUIRE_HYPOTHESIS_EXAMPLES", "40")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
