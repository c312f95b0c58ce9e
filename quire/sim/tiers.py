"""Tiers in a simulation: the real ones, on a folder, one job at a time, with late news and faults.

Each fault is drawn from the seed, so that a run can be repeated. What the tiers do wrong shows as a
token that the oracle has not.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from random import Random

from quire.core.plan import Record, StepPlan
from quire.core.scheduler.tiers import MAX_READ_S, RestoreCosts, StoredPrefixes, TierStats
from quire.core.step_cost import NUM_COSTS, StepCostModel, UnitCosts
from quire.core.tiers import TIERS, StoredKey
from quire.executor.null import NullMemory
from quire.tiers.companion import StoredBlocks
from quire.tiers.disk import DiskStore
from quire.tiers.segments import CacheIdentity

_FAULT_CHANCE, _HANG_CHANCE = 0.1, 0.002


class _FailingStore(DiskStore):
    """A disk that is full from some moment on."""

    num_left = 1 << 30
    """Records that it still takes."""

    def append(self, records: Sequence[tuple[StoredKey, memoryview]]) -> tuple[bytes, ...]:
        self.num_left -= len(records)
        if self.num_left < 0:
            raise OSError(errno.ENOSPC, "injected: no space left")
        return super().append(records)


class SimulatedTiers:
    """Both halves for one run. Implements `Companion` around the worker's half."""

    name = TIERS

    def __init__(
        self, seed: int, folder: Path, *, has_faults: bool = True, identity: bytes = bytes(32)
    ) -> None:
        """`identity` stands for all that decides bits: runs with the same one share a folder."""
        self.stats = TierStats()
        self._random = Random(seed ^ 0x71E5)
        self._folder, self._has_faults, self._identity = folder, has_faults, identity
        self._half: StoredBlocks
        self._late: deque[Record] = deque()
        self._hangs = 0
        """Steps for which nothing is heard of."""

    def prerequisite(self) -> StoredPrefixes:
        """The control plane's half. A token takes as long as a block to read, so that it always
        pays."""
        model = StepCostModel(UnitCosts(*(1.0,) * NUM_COSTS))
        return StoredPrefixes(RestoreCosts(model, 0.0), self.stats)

    def attach(self, memory: NullMemory, block_size: int, num_groups: int) -> None:
        """Begin on an executor's memory."""
        payload_bytes = num_groups * memory.block_bytes
        identity = CacheIdentity(self._identity, block_size, payload_bytes)
        max_blocks = self._random.choice((4, 16, 64))
        host_bytes = self._random.choice((0, 0, 3 * payload_bytes))
        num_left = self._random.choice((1 << 30, self._random.randrange(40)))

        def open_store() -> DiskStore:
            store = _FailingStore(self._folder, identity, max_blocks * identity.record_bytes)
            store.num_left = num_left if self._has_faults else 1 << 30
            return store

        self._half = StoredBlocks(memory, open_store, host_bytes, is_threaded=False)

    def begin(self, plan: StepPlan) -> None:
        self._half.begin(plan)
        if self._has_faults and self._random.random() < _FAULT_CHANCE:
            self._damage()

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        """Some of it now, some later, and some too late."""
        self._late.extend(self._half.take_news(0.0))
        if self._hangs:
            self._hangs -= 1
            return ()
        if self._has_faults and self._random.random() < _HANG_CHANCE:
            self._hangs = 2 * int(MAX_READ_S)
        count = self._random.choice((0, 1, 100, 100))
        return tuple(self._late.popleft() for _ in range(min(count, len(self._late))))

    def close(self) -> None:
        self._half.close()

    def _damage(self) -> None:
        """Flip a bit of a file, cut one short, or remove one, as another process might."""
        files = sorted(self._folder.rglob("*.kv"))
        if not files:
            return
        path = self._random.choice(files)
        data, status = bytearray(path.read_bytes()), path.stat()
        kind = self._random.choice(("flip", "flip", "cut", "remove"))
        if kind == "flip" and data:
            place = self._random.randrange(len(data))
            data[place] ^= 1 << self._random.randrange(8)
            path.write_bytes(data)
        elif kind == "cut":
            path.write_bytes(data[: self._random.randrange(len(data) + 1)])
        if kind == "remove":
            path.unlink()
        else:  # which a reader's time would tell, and no run has the same
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
