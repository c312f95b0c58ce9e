"""The folder of one cache: its segments, their index, and who may write.

Owns the files below one identity's folder: one process writes (it holds a lock that ends with it),
any number read. The index is in memory and made of the files, which are looked at again for what
others have written. Bounded: segments of other identities in the same folder are removed first,
then those that `quire.tiers.eviction` says are worth least. Errors of the system are the caller's
to judge.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from quire.core.tiers import StoredKey
from quire.tiers.eviction import Standing, least_worth_first
from quire.tiers.segments import CacheIdentity, RecordHead, Segment, decode, encode

_SUFFIX = ".kv"
_LOCK = "lock"
_NAME_LEN = 64
"""Of an identity's folder: 32 bytes in hexadecimal digits."""
_SEGMENT_SHARE = 16
"""A segment is at most this part of the whole: what is removed at once."""
_MAX_SEGMENT_BYTES = 256 << 20
_MAX_READ_BYTES = 32 << 20


class _Place(NamedTuple):
    """Where a record lies."""

    segment: int
    record: int
    parent: bytes
    cost: float
    """Of computing it."""


def _same_for_all(place: int) -> float:
    return 1.0


class DiskStore:
    """Stored blocks of one identity."""

    def __init__(
        self,
        root: Path,
        identity: CacheIdentity,
        max_bytes: int,
        cost_of: Callable[[int], float] = _same_for_all,
    ) -> None:
        """Open the folder, and read which records there are. `cost_of` tells what it costs to
        compute a block with so many before it, above zero, in any unit. Raises OSError."""
        self._root = root
        self._folder = root / identity.digest.hex()
        self._identity = identity
        self._max_bytes = max_bytes
        self._cost_of = cost_of
        self._segment_bytes = max(
            identity.record_bytes, min(_MAX_SEGMENT_BYTES, max_bytes // _SEGMENT_SHARE)
        )
        self._segments: dict[int, Segment] = {}
        self._uses: dict[int, int] = {}
        """The last use of each segment, by the number of uses of all."""
        self._num_uses = 0
        self._used_ns: dict[int, int] = {}
        """When a segment's file was last used, as far as this process knows."""
        self._index: dict[bytes, _Place] = {}
        self._current: int | None = None
        """The segment that is being written: always one that this process began."""
        self.is_writer = False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _open_lock(self._folder)
        self.refresh()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of all records."""
        return tuple(self._index)

    def refresh(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Look for what others have written and removed, and become the writer if there is none;
        return digests that are new, and that are gone. Raises OSError."""
        if not self.is_writer:
            self.is_writer = _take(self._lock)
        found = _segments_in(self._folder)
        gone = [self._forget(number) for number in list(self._segments) if number not in found]
        new: list[bytes] = []
        for number in found:
            segment = self._segments.get(number)
            if segment is None:
                segment = self._add(number)
                self._see(number)
            if number == self._current:
                continue
            with contextlib.suppress(FileNotFoundError):
                for head, record in segment.scan():
                    self._note(head, number, record)
                    new.append(head.digest)
        return tuple(new), tuple(digest for each in gone for digest in each)

    def append(self, records: Sequence[tuple[StoredKey, memoryview]]) -> tuple[bytes, ...]:
        """Store blocks; return digests of others that had to make room. Raises OSError, behind
        which nothing is to be appended."""
        assert self.is_writer
        gone: list[bytes] = []
        most = max(1, self._segment_bytes // self._identity.record_bytes)
        for start in range(0, len(records), most):
            batch = records[start : start + most]
            number = self._writable(len(batch))
            gone += self._make_room(len(batch) * self._identity.record_bytes)
            pieces = [piece for key, payload in batch for piece in encode(key, payload)]
            first = self._segments[number].append(pieces, len(batch))
            for record, (key, _) in enumerate(batch, first):
                self._note(RecordHead(key.digest, key.parent, key.place), number, record)
            self._see(number)
        return tuple(digest for digest in gone if digest not in self._index)

    def read(self, keys: Sequence[StoredKey]) -> Iterator[memoryview | None]:
        """Yield the payload of each key, None where it is not here, or not what was stored.
        Records that lie behind one another are read together. Raises OSError for a disk that
        fails."""
        places = [self._index.get(key.digest) for key in keys]
        numbered = enumerate(places)
        size = self._identity.record_bytes
        for (number, _), members in groupby(numbered, key=_run_of):
            run = [place for place, _ in members]
            if number is None:
                yield from (None for _ in run)
                continue
            most = max(1, _MAX_READ_BYTES // size)
            for start in range(0, len(run), most):
                part = run[start : start + most]
                where = places[part[0]]
                assert where is not None
                data = self._read(where, len(part))
                for place, key in enumerate(keys[part[0] : part[0] + len(part)]):
                    yield decode(data[place * size : (place + 1) * size], key)

    def drop(self, digest: bytes) -> None:
        """Forget what is stored under a digest, for good. Raises OSError."""
        place = self._index.pop(digest, None)
        if place is not None and self.is_writer:
            with contextlib.suppress(FileNotFoundError):
                self._segments[place.segment].void(place.record)
                self._see(place.segment)

    def close(self) -> None:
        """Let another process write. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self.is_writer = False

    def _note(self, head: RecordHead, segment: int, record: int) -> None:
        place = _Place(segment, record, head.parent, self._cost_of(head.place))
        self._index[head.digest] = place

    def _read(self, where: _Place, count: int) -> memoryview:
        segment = self._segments[where.segment]
        self._use(where.segment)
        try:
            data = segment.read(where.record, count)
            with contextlib.suppress(OSError):
                os.utime(segment.path)
                self._see(where.segment)
        except FileNotFoundError:  # its writer has removed it
            return memoryview(b"")
        return data

    def _see(self, number: int) -> None:
        """Tell this process's own use of a segment's file from those of others."""
        self._used_ns[number] = _last_used_ns(_path(self._folder, number))

    def _add(self, number: int) -> Segment:
        segment = self._segments[number] = Segment(_path(self._folder, number), self._identity)
        self._used_ns[number] = 0
        self._use(number)
        return segment

    def _use(self, number: int) -> None:
        """Note that a segment is used now."""
        self._num_uses += 1
        self._uses[number] = self._num_uses

    def _note_uses_of_others(self) -> None:
        """Note which segments other processes have read since this one last looked."""
        times = {number: _last_used_ns(_path(self._folder, number)) for number in self._segments}
        for number in sorted(times, key=times.__getitem__):
            if times[number] != self._used_ns[number]:
                self._use(number)
        self._used_ns = times

    def _writable(self, num_records: int) -> int:
        """The segment to append so many records to."""
        current = self._current
        if current is not None and _path(self._folder, current).exists():
            segment = self._segments[current]
            size = (segment.num_records + num_records) * self._identity.record_bytes
            if size <= self._segment_bytes:
                return current
        number = 1 + max(_segments_in(self._folder), default=0)
        self._add(number)
        self._current = number
        return number

    def _make_room(self, num_bytes: int) -> list[bytes]:
        """Remove what is worth least until so many bytes more are allowed."""
        gone: list[bytes] = []
        excess = _size_of(self._root) + num_bytes - self._max_bytes
        if excess > 0:
            excess -= self._remove_others(excess)
        if excess <= 0:
            return gone
        self._note_uses_of_others()
        for number in least_worth_first(self._standings()):
            if excess <= 0:
                break
            if number != self._current:
                path = _path(self._folder, number)
                with contextlib.suppress(FileNotFoundError):
                    excess -= path.stat().st_size
                    path.unlink()
                gone += self._forget(number)
        return gone

    def _standings(self) -> dict[int, Standing]:
        """Of all segments."""
        costs, counts = defaultdict[int, float](float), defaultdict[int, int](int)
        continued = defaultdict[int, set[int]](set)
        for number, _, digest, cost in self._index.values():
            costs[number] += cost
            counts[number] += 1
            parent = self._index.get(digest)
            if parent is not None and parent.segment != number:
                continued[number].add(parent.segment)
        return {
            number: Standing(
                costs[number] / max(1, counts[number]),
                self._num_uses - self._uses[number] + 1,
                frozenset(continued[number]),
            )
            for number in self._segments
        }

    def _remove_others(self, num_bytes: int) -> int:
        """Remove segments of other identities that have no writer; return their bytes."""
        removed = 0
        for folder in sorted(_folders_in(self._root), key=_last_used):
            if folder == self._folder or removed >= num_bytes:
                continue
            lock = _open_lock(folder)
            try:
                if not _take(lock):
                    continue
                for number in _segments_in(folder):
                    path = _path(folder, number)
                    removed += path.stat().st_size
                    path.unlink()
                    if removed >= num_bytes:
                        break
            finally:
                os.close(lock)
        return removed

    def _forget(self, number: int) -> list[bytes]:
        del self._segments[number], self._uses[number], self._used_ns[number]
        gone = [digest for digest, place in self._index.items() if place.segment == number]
        for digest in gone:
            del self._index[digest]
        return gone


def _last_used_ns(path: Path) -> int:
    """0 where it is not there."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def _run_of(numbered: tuple[int, _Place | None]) -> tuple[int | None, int]:
    """What places of a run have in common: the segment, and how far record and place are apart."""
    place, where = numbered
    return (None, 0) if where is None else (where.segment, where.record - place)


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _take(lock: int) -> bool:
    """Take a lock that ends with this process, or its descriptor; False where another has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _segments_in(folder: Path) -> list[int]:
    """Numbers of the segments, the one that was used least recently first."""
    found: list[tuple[float, int]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(_SUFFIX)
            if name != entry.name and name.isdecimal():
                with contextlib.suppress(FileNotFoundError):
                    if not entry.is_file(follow_symlinks=False):
                        continue  # a pipe, for one, would be waited for
                    found.append((entry.stat().st_mtime, int(name)))
    return [number for _, number in sorted(found)]


def _folders_in(root: Path) -> list[Path]:
    """Folders of identities."""
    with os.scandir(root) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if len(entry.name) == _NAME_LEN and entry.is_dir(follow_symlinks=False)
        ]


def _size_of(root: Path) -> int:
    """Bytes of all segments of all identities."""
    total = 0
    for folder in _folders_in(root):
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat().st_size
    return total


def _last_used(folder: Path) -> float:
    """When a segment of a folder was last used."""
    numbers = _segments_in(folder)
    with contextlib.suppress(FileNotFoundError):
        return _path(folder, numbers[-1]).stat().st_mtime if numbers else 0.0
    return 0.0


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{_SUFFIX}"
