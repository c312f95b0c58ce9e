"""Prompts that a producer keeps for others: bounded in bytes, each until it was fetched or its
lease has ended."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.transfer.layout import Chunk

MAX_LEASES = 4096
"""Remembered at once, with nothing kept or much."""


class Shelf(Protocol):
    """Memory for one prompt's chunks."""

    @property
    def fileno(self) -> int | None:
        """A descriptor by which other processes can map it; None where it has none."""
        ...

    def put(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks as they lie there, one behind the other."""
        ...

    def close(self) -> None:
        """Give it back. Chunks are not read any more."""
        ...


@dataclass(slots=True)
class StagedPrompt:
    """One prompt."""

    content: bytes
    """Digest of the prompt."""
    ends_s: float
    num_tokens: int = 0
    starts: tuple[int, ...] = ()
    """Of each layer the first token that there is."""
    chunks: list[Chunk] = field(default_factory=list)
    checksums: list[bytes] = field(default_factory=list)
    shelf: Shelf | None = None
    num_bytes: int = 0
    is_ready: bool = False
    num_readers: int = 0
    is_dropped: bool = False


class LeaseBook:
    """All leases of a producer. For any thread."""

    def __init__(
        self, max_bytes: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._lease_s, self._clock = max_bytes, lease_s, clock
        self._leases: OrderedDict[str, StagedPrompt] = OrderedDict()
        self._change = threading.Condition()
        self.num_bytes = 0
        """Kept now, or reserved."""
        self.num_expired = 0
        """Leases that ended before anyone fetched what they were for."""

    def __len__(self) -> int:
        return len(self._leases)

    def reserve(self, name: str, content: bytes, num_bytes: int) -> bool:
        """Begin a lease; False where there is no room for so much, and consumers are told so."""
        self.expire()
        with self._change:
            lease = self._leases[name] = StagedPrompt(content, self._clock() + self._lease_s)
            while len(self._leases) > MAX_LEASES:
                self._drop(next(iter(self._leases)))
            has_room = self.num_bytes + num_bytes <= self._max_bytes
            if has_room:
                lease.num_bytes = num_bytes
                self.num_bytes += num_bytes
            else:
                lease.is_ready = True
            self._change.notify_all()
            return has_room

    def fill(self, name: str, filled: StagedPrompt) -> None:
        """Add what is kept. Its bytes are those that were reserved, whatever their number."""
        with self._change:
            lease = self._leases.get(name)
            if lease is None:
                if filled.shelf is not None:
                    filled.shelf.close()
                return
            lease.num_tokens, lease.starts = filled.num_tokens, filled.starts
            lease.chunks, lease.checksums = filled.chunks, filled.checksums
            lease.shelf, lease.is_ready = filled.shelf, True
            self._change.notify_all()

    def open(self, name: str, wait_s: float) -> StagedPrompt | None:
        """Return a lease once it is filled, to be closed again; None where none comes in time."""
        ends_s = self._clock() + wait_s
        with self._change:
            while True:
                lease = self._leases.get(name)
                if lease is not None and lease.is_ready:
                    lease.num_readers += 1
                    return lease
                left_s = ends_s - self._clock()
                if left_s <= 0:
                    return None
                self._change.wait(left_s)

    def close(self, name: str, lease: StagedPrompt, *, is_done: bool) -> None:
        """End reading; `is_done`: it is not needed again."""
        with self._change:
            lease.num_readers -= 1
            if is_done and self._leases.get(name) is lease:
                self._drop(name)
            elif lease.is_dropped:
                self._free(lease)

    def expire(self) -> None:
        """Give back what was not fetched in time."""
        with self._change:
            now = self._clock()
            for name, lease in list(self._leases.items()):
                if lease.ends_s <= now:
                    self.num_expired += bool(lease.num_bytes)
                    self._drop(name)

    def clear(self) -> None:
        """Give everything back."""
        with self._change:
            for name in list(self._leases):
                self._drop(name)

    def _drop(self, name: str) -> None:
        lease = self._leases.pop(name)
        lease.is_dropped = True
        self._free(lease)

    def _free(self, lease: StagedPrompt) -> None:
        """Give bytes back, once nothing reads them."""
        if lease.num_readers:
            return
        self.num_bytes -= lease.num_bytes
        lease.num_bytes = 0
        lease.chunks = []
        shelf, lease.shelf = lease.shelf, None
        if shelf is not None:
            shelf.close()


def checksum(data: memoryview) -> bytes:
    """Return 16 bytes that a changed bit changes."""
    return hashlib.blake2b(data, digest_size=16).digest()
