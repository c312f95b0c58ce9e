"""The KV bookkeeping against a model of the memory: whatever is done in whatever order, every table
reads back its tokens.

The model writes tokens into slots as a worker would and knows nothing of references or digests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.kvcache.audit import audit_manager
from quire.core.kvcache.manager import BlockTable, KVCacheManager
from quire.core.kvcache.prefix import ChainKeys, PrefixIndex
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
    )
    def start(self, num_blocks: int, size: int, digest: str) -> None:
        self.manager = KVCacheManager(num_blocks, size)
        if digest == "colliding":
            self.manager.index = PrefixIndex(
                size, lambda parent, content: bytes([sum(parent + content) % 3]) * 16
            )
        self.memory: list[list[int | None]] = [[None] * size for _ in range(num_blocks)]
        self.owners: list[_Owner] = []

    @rule(tokens=_TOKENS)
    def admit(self, tokens: list[int]) -> None:
        manager = self.manager
        keys = manager.index.keys(())
        match = manager.match(keys, tokens, len(tokens) - 1)
        num_new = manager.num_blocks_for(len(tokens)) - len(match.nodes)
        if num_new + manager.num_free_in(match) > manager.pool.num_free:
            return
        owner = _Owner(manager.new_table(()), keys, tokens)
        copy = manager.adopt(owner.table, match)
        self._apply(copy)
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

    @invariant()
    def everything_adds_up(self) -> None:
        audit_manager(self.manager, [owner.table for owner in self.owners])

    @invariant()
    def every_table_reads_back_its_tokens(self) -> None:
        for owner in self.owners:
            slots = [token for block in owner.table.blocks for token in self.memory[block]]
            assert slots[: len(owner.tokens)] == owner.tokens

    @invariant()
    def every_cached_block_holds_what_it_promises(self) -> None:
        for node in self.manager.index.nodes():
            assert tuple(self.memory[node.block][: len(node.tokens)]) == node.tokens

    def _pick(self, data: st.DataObject) -> _Owner:
        return self.owners[data.draw(st.integers(0, len(self.owners) - 1), label="owner")]

    def _write(self, owner: _Owner, start: int, end: int) -> None:
        change = self.manager.extend(owner.table, start, end)
        self._apply(change.copy)
        for position in range(start, end):
            self._set(owner, position, owner.tokens[position])

    def _set(self, owner: _Owner, position: int, token: int) -> None:
        place, offset = divmod(position, self.manager.block_size)
        self.memory[owner.table.blocks[place]][offset] = token

    def _apply(self, copy: BlockCopy | None) -> None:
        if copy is not None:
            self.memory[copy.destination] = self.memory[copy.source].copy()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(
    max_examples=int(os.environ.get("QUIRE_HYPOTHESIS_EXAMPLES", "40")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
