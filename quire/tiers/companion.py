"""The worker's half of the tiers: copies blocks out of the pool and into it between two steps, and
reads and writes files beside them.

The pool's memory is touched only in `begin`, by the thread that computes the steps: a block that is
kept still has its content there, whatever the plan will do with it, and one that is placed has it
before the plan's work. All else is done by one thread, reading before writing. What cannot be
written fast enough is left out. A disk that fails ends storing with one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.common.failures import log_failure
from quire.core.plan import Record, StepPlan
from quire.core.tiers import TIERS, StoredKey, StoreMedium, TierNews, TierOrder
from quire.errors import QuireError
from quire.tiers.compression import Compression
from quire.tiers.disk import DiskStore
from quire.tiers.eviction import LeavesFirst

logger = logging.getLogger(__name__)

Payload = NDArray[np.uint8]

MAX_BACKLOG_BYTES = 256 << 20
"""Copied and not yet written. A prompt's keys and values come at some 20 MB/s on a CPU (Qwen3-0.6B,
200 tokens/s), so that it takes a disk that stalls for seconds."""
MAX_FETCHED_BYTES = 256 << 20
"""Read and not yet placed; reading goes on once there is less."""
MIN_WRITE_BYTES = 512 << 10
"""Larger transfers gain little, smaller ones cost several times as much a byte."""
MAX_DELAY_S = 0.25
"""After which less than that is written, too."""
PROMPT_PAUSE_S = 0.25
"""After the last step that computed a prompt: until then writing waits, whose checksums and copies
into the page cache take a core from those that compute (1 ms of each 94 ms in which two cores
compute 16 tokens of Qwen3-0.6B). Steps that decode wait for memory more than for cores."""
MAX_POSTPONED_BYTES, MAX_POSTPONED_S = MAX_BACKLOG_BYTES // 2, 10.0
"""Beyond which it does not wait."""
_MAX_WRITE_BYTES = 8 << 20
_REFRESH_S = 1.0
_CLOSE_S = 30.0


class BlockMemory(Protocol):
    """The pool's blocks as bytes."""

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> Payload:
        """Return a copy of some blocks, one behind the other."""
        ...

    def write_blocks(self, blocks: Sequence[int], payload: Payload) -> None:
        """Write bytes that `read_blocks` returned into as many blocks."""
        ...


class HostBlocks:
    """Stored blocks in this process's memory, up to a number of bytes; what nothing stored
    continues and was least recently used goes first."""

    def __init__(self, max_bytes: int, compression: Compression | None = None) -> None:
        self.compression = compression
        """None where blocks are stored as they are."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._records: dict[bytes, tuple[StoredKey, Payload]] = {}
        self._order = LeavesFirst()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._records

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of all records."""
        return tuple(self._records)

    def add(self, key: StoredKey, payload: Payload) -> list[bytes]:
        """Store one, in the form it is stored in; return digests of those that had to make room,
        its own if it is too large."""
        self.drop(key.digest)
        self._records[key.digest] = key, payload
        self._order.add(key.digest, key.parent)
        self._num_bytes += payload.nbytes
        gone = []
        while self._num_bytes > self._max_bytes:
            gone.append(self._order.first())
            self.drop(gone[-1])
        return gone

    def get(self, key: StoredKey) -> Payload | None:
        """Return what was stored under a key, in the form it is stored in."""
        found = self._records.get(key.digest)
        if found is None or found[0] != key:
            return None
        self._order.use(key.digest)
        return found[1]

    def drop(self, digest: bytes) -> None:
        """Forget one."""
        found = self._records.pop(digest, None)
        if found is not None:
            self._order.remove(digest)
            self._num_bytes -= found[1].nbytes


class StoredBlocks:
    """Implements `Companion`."""

    name = TIERS

    def __init__(
        self,
        memory: BlockMemory,
        open_store: Callable[[], DiskStore] | None = None,
        host_bytes: int = 0,
        *,
        compression: Compression | None = None,
        is_threaded: bool = True,
    ) -> None:
        """`open_store` is called beside the steps; it may take its time, and raise OSError.
        `compression` is that of what the host's memory keeps. Without a thread, all is done in
        `take_news`: for simulations."""
        self._memory = memory
        self._open_store = open_store
        self._store: DiskStore | None = None
        self._given_up: DiskStore | None = None
        """A store of which nothing is read and to which nothing is written any more, but that what
        is in doubt is taken back from."""
        self._host = HostBlocks(host_bytes, compression)
        self._has_host = host_bytes > 0
        self._change = threading.Condition()
        """Guards all that follows, and the host's blocks."""
        self._jobs: deque[TierOrder] = deque()
        self._writes: deque[tuple[StoredKey, Payload]] = deque()
        self._backlog_bytes = 0
        self._oldest_s = 0.0
        """When the first of the writes that wait came."""
        self._prompt_s = 0.0
        """When a prompt was last computed."""
        self._wanted: set[int] = set()
        """Fetches that have not been cancelled."""
        self._fetched: dict[int, list[Payload]] = {}
        self._news: list[TierNews] = []
        self._is_open = open_store is None
        self._is_closing = False
        self._is_working = not self._is_open
        """Whether the thread has something in its hands."""
        self._in_hand: list[bytes] = []
        """Digests of what it is writing."""
        self._thread: threading.Thread | None = None
        if is_threaded:
            self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
            self._thread.start()

    # -- in the thread of the steps
    # ----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        if any(work.num_tokens - work.num_ahead > 1 for work in plan.work):
            self._prompt_s = time.monotonic()
        for order in map(TierOrder._make, plan.orders.get(TIERS, ())):
            match order.verb:
                case "keep":
                    self._keep(order)
                case "place":
                    self._place(order)
                case "cancel":
                    with self._change:
                        self._wanted.discard(order.number)
                        self._fetched.pop(order.number, None)
                        self._change.notify_all()
                case _:
                    self._ask(order)

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        if self._thread is None:
            self._work_off()
        with self._change:
            if not self._news and (self._jobs or self._wanted):
                self._change.wait(wait_s)
            news, self._news = tuple(self._news), []
        return news

    def close(self) -> None:
        with self._change:
            self._is_closing = True
            self._change.notify_all()
        if self._thread is None:
            self._work_off()
            self._end()
        else:
            self._thread.join(_CLOSE_S)

    @property
    def is_busy(self) -> bool:
        """Whether something is to be read or written, or is being so."""
        with self._change:
            return bool(self._jobs or self._writes) or self._is_working

    def _ask(self, order: TierOrder) -> None:
        with self._change:
            if order.verb == "begin":
                self._jobs = deque(job for job in self._jobs if job.verb == "drop")
                self._wanted.clear()
                self._fetched.clear()
                self._news.clear()
            elif order.verb == "fetch":
                self._wanted.add(order.number)
            else:
                dropped = {key.digest for key in order.keys}
                self._writes = deque(each for each in self._writes if each[0].digest not in dropped)
                self._backlog_bytes = sum(payload.nbytes for _, payload in self._writes)
            self._jobs.append(order)
            self._change.notify_all()

    def _keep(self, order: TierOrder) -> None:
        """Copy blocks that are not stored yet, as many as there is room for."""
        size = self._memory.block_bytes
        with self._change:
            room = MAX_BACKLOG_BYTES - self._backlog_bytes if self._can_queue else 0
            if self._holds_at_once:
                room = max(room, MAX_BACKLOG_BYTES)
            stored = [self._is_stored(key.digest) for key in order.keys]
        kept: list[tuple[StoredKey, Payload]] = []
        refused = list[bytes]()
        for key, blocks, is_stored in zip(order.keys, order.blocks, stored, strict=True):
            room -= len(blocks) * size
            if is_stored:
                continue
            if room < 0:
                refused.append(key.digest)
            else:
                kept.append((key, self._memory.read_blocks(blocks)))
        with self._change:
            known = [
                key.digest for key, is_stored in zip(order.keys, stored, strict=True) if is_stored
            ]
            self._tell_stored(known)
            self._gone([*known, *refused])
            self._add(kept)
            self._change.notify_all()

    def _add(self, kept: list[tuple[StoredKey, Payload]]) -> None:
        """Hand over copies: to the host's memory, to the thread, or both."""
        if self._holds_at_once:
            self._hold(kept)
        if self._can_queue and kept:
            if not self._writes:
                self._oldest_s = time.monotonic()
            self._writes.extend(kept)
            self._backlog_bytes += sum(payload.nbytes for _, payload in kept)

    def _hold(self, kept: Sequence[tuple[StoredKey, Payload]]) -> None:
        """Store in the host's memory, in the form that it has there."""
        gone = [each for key, payload in kept for each in self._host.add(key, payload)]
        self._known("host", [key.digest for key, _ in kept], len(kept))
        self._gone(gone, "host")

    def _place(self, order: TierOrder) -> None:
        with self._change:
            self._wanted.discard(order.number)
            payloads = self._fetched.pop(order.number)
        for blocks, payload in zip(order.blocks, payloads[order.first :], strict=False):
            self._memory.write_blocks(blocks, payload)
        with self._change:
            self._news.append(TierNews("placed", order.number))
            self._change.notify_all()

    # -- beside the steps
    # ----------------------------------------------------------------------------------------------

    @property
    def _holds_at_once(self) -> bool:
        """Whether blocks get into the host's memory between two steps."""
        return self._has_host and self._host.compression is None

    @property
    def _can_queue(self) -> bool:
        """Whether the thread has something to do with blocks."""
        return self._can_write or (self._has_host and self._host.compression is not None)

    @property
    def _can_write(self) -> bool:
        """Whether blocks may be written to a disk; not yet known before it is open."""
        if self._store is None:
            return self._open_store is not None and not self._is_open
        return self._store.is_writer

    @property
    def _can_read(self) -> bool:
        """Whether there is room for what is read, which the next steps make."""
        num_bytes = sum(payload.nbytes for each in self._fetched.values() for payload in each)
        return self._thread is None or num_bytes < MAX_FETCHED_BYTES

    def _is_stored(self, digest: bytes) -> bool:
        return digest in self._host or (self._store is not None and digest in self._store)

    def _known(
        self, medium: StoreMedium, digests: Iterable[bytes], count: int = 0, num_bytes: int = 0
    ) -> None:
        """Say that a tier has these."""
        known = tuple(digests)
        if known:
            news = TierNews("known", 0, known, count, num_bytes=num_bytes, medium=medium)
            self._news.append(news)

    def _tell_stored(self, digests: Sequence[bytes]) -> None:
        """Say which tiers have these."""
        self._known("host", (each for each in digests if each in self._host))
        if self._store is not None:
            store = self._store
            self._known("disk", (each for each in digests if each in store))

    def _gone(self, digests: Iterable[bytes], medium: StoreMedium | None = None) -> None:
        """Say that a tier does not have these any more; without one, that none has them, those that
        none has."""
        gone = tuple(each for each in digests if medium is not None or not self._is_stored(each))
        if gone:
            self._news.append(TierNews("gone", 0, gone, medium=medium))

    def _run(self) -> None:
        has_more = True
        while has_more:
            try:  # behind a failure the host's memory is served, and what is in doubt dropped
                self._open()
                has_more = self._work(_REFRESH_S)
            except Exception as error:
                self._give_up(error)
        self._end()

    def _work_off(self) -> None:
        """Do all that there is to do, and return."""
        try:
            self._open()
            while self._jobs or self._writes:
                self._work(0.0)
        except Exception as error:
            self._give_up(error)

    def _open(self) -> None:
        if not self._is_open:
            assert self._open_store is not None
            store = self._open_store()
            with self._change:
                self._store, self._is_open = store, True

    def _work(self, wait_s: float) -> bool:
        """Do what is next, or wait for it; False where nothing is to come. Raises OSError."""
        with self._change:
            self._is_working = False
            job = self._jobs.popleft() if self._jobs and self._can_read else None
            batch = [] if job is not None else self._take_writes()
            if job is None and not batch:
                if self._is_closing and not self._writes:
                    return False
                self._change.wait(MAX_DELAY_S if self._writes else wait_s)
                if self._jobs or self._writes:
                    return True
            self._is_working = job is not None or bool(batch)
            self._in_hand = [key.digest for key, _ in batch]
        if job is not None:
            self._carry_out(job)
        elif batch:
            self._write(batch)
        elif wait_s and self._store is not None and not self._store.is_writer:
            new, gone = self._store.refresh()
            with self._change:
                self._known("disk", new)
                self._gone(gone, "disk")
        return True

    def _take_writes(self) -> list[tuple[StoredKey, Payload]]:
        """Take what is worth a transfer now."""
        now = time.monotonic()
        is_postponed = (
            now - self._prompt_s < PROMPT_PAUSE_S
            and self._backlog_bytes < MAX_POSTPONED_BYTES
            and now - self._oldest_s < MAX_POSTPONED_S
        )
        is_enough = self._backlog_bytes >= MIN_WRITE_BYTES or now - self._oldest_s >= MAX_DELAY_S
        is_due = self._is_closing or self._thread is None or (is_enough and not is_postponed)
        batch, num_bytes = list[tuple[StoredKey, Payload]](), 0
        while self._writes and is_due and num_bytes < _MAX_WRITE_BYTES:
            batch.append(self._writes.popleft())
            num_bytes += batch[-1][1].nbytes
        self._backlog_bytes -= num_bytes
        return batch

    def _write(self, batch: list[tuple[StoredKey, Payload]]) -> None:
        store, digests = self._store, [key.digest for key, _ in batch]
        if self._has_host and self._host.compression is not None:
            pack = self._host.compression.pack
            packed = [(key, pack(payload)) for key, payload in batch]
            with self._change:
                self._hold(packed)
        if store is None or not store.is_writer:
            with self._change:
                self._gone(digests)
            return
        gone = store.append([(key, payload.data) for key, payload in batch])
        num_bytes = sum(payload.nbytes for _, payload in batch)
        with self._change:
            self._known("disk", digests, 0 if self._has_host else len(batch), num_bytes)
            self._gone(gone, "disk")

    def _carry_out(self, order: TierOrder) -> None:
        if order.verb == "begin":
            with self._change:
                if self._has_host or self._store is not None:
                    self._known("host", self._host.digests)
                    self._known("disk", () if self._store is None else self._store.digests)
                    self._news.append(TierNews("complete", order.number))
                else:
                    self._news.append(TierNews("off", order.number))
                self._change.notify_all()
        elif order.verb == "drop":
            for key in order.keys:
                self._drop(key.digest)
        else:
            self._fetch(order)

    def _drop(self, digest: bytes) -> None:
        with self._change:
            self._host.drop(digest)
        if self._store is not None:
            self._store.drop(digest)
        elif self._given_up is not None:
            with contextlib.suppress(OSError):
                self._given_up.drop(digest)

    def _fetch(self, order: TierOrder) -> None:
        """Read as many places as are what they were, up to the first that is not. Those behind it
        are forgotten, too: they are computed again in any case, and may be no better."""
        started = time.perf_counter()
        payloads, missing = list[Payload](), list[bytes]()
        num_faulty = 0
        for key, payload in zip(order.keys, self._read(order.keys), strict=True):
            if payload is not None and not missing:
                payloads.append(payload)
                continue
            num_faulty += payload is None and self._is_stored(key.digest)
            missing.append(key.digest)
            self._drop(key.digest)
        num_bytes = sum(payload.nbytes for payload in payloads)
        seconds = time.perf_counter() - started
        with self._change:
            self._gone(missing)
            if order.number in self._wanted:
                self._fetched[order.number] = payloads
                news = TierNews(
                    "fetched", order.number, (), len(payloads), seconds, num_bytes, num_faulty
                )
                self._news.append(news)
            self._change.notify_all()

    def _read(self, keys: Sequence[StoredKey]) -> Iterator[Payload | None]:
        with self._change:
            found = [self._host.get(key) for key in keys]
        absent = [key for key, payload in zip(keys, found, strict=True) if payload is None]
        on_disk = iter(()) if self._store is None else self._store.read(absent)
        compression = self._host.compression
        for payload in found:
            if payload is None:
                data = next(on_disk, None)
                yield None if data is None else np.frombuffer(data, np.uint8)
            else:
                yield payload if compression is None else compression.unpack(payload)

    def _give_up(self, error: Exception) -> None:
        """Store nothing on a disk from now on; what is in the host's memory stays, and only what
        was to get there is not."""
        has_disk = self._store is not None or self._open_store is not None
        message = (
            "the KV cache on disk is not used any more"
            if has_disk
            else "blocks could not be kept in host memory"
        )
        if isinstance(error, OSError | QuireError):
            logger.error("%s: %s", message, error)
        else:
            log_failure(logger, message, error)
        with self._change:
            lost = () if self._store is None else self._store.digests
            pending = {*self._in_hand, *(key.digest for key, _ in self._writes)}
            if self._store is not None:
                self._given_up = self._store
            self._store, self._open_store, self._is_open = None, None, True
            self._writes.clear()
            self._in_hand.clear()
            self._backlog_bytes = 0
            if self._has_host:
                self._gone(lost, "disk")
                self._gone(pending)
            else:
                self._news.append(TierNews("off"))
            queued = {job.number for job in self._jobs}
            self._news += [
                TierNews("fetched", number)
                for number in self._wanted - self._fetched.keys() - queued
            ]
            self._change.notify_all()

    def _end(self) -> None:
        for store in (self._store, self._given_up):
            if store is not None:
                store.close()
