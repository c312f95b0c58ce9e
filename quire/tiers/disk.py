"""The folder of one cache: its segments, their index, and who may write.

Owns the files below one identity's folder: one process writes (it holds a lock that ends with it),
any number read. The index is in memory and made of the files, which are looked at again for what
others have written. Bounded: the segment that was used least recently is removed first, those of
other identities in the same folder before. Errors of the system are the caller's to judge.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from quire.core.tiers import StoredKey
from quire.tiers.segments import CacheIdentity, Segment, decode, encode

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


class DiskStore:
    """Stored blocks of one identity."""

    def __init__(self, root: Path, identity: CacheIdentity, max_bytes: int) -> None:
        """Open the folder, and read which records there are. Raises OSError."""
        self._root = root
        self._folder = root / identity.digest.hex()
        self._identity = identity
        self._max_bytes = max_bytes
        self._segment_bytes = max(
            identity.record_bytes, min(_MAX_SEGMENT_BYTES, max_bytes // _SEGMENT_SHARE)
        )
        self._segments: dict[int, Segment] = {}
        """Least recently used first."""
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
                segment = self._segments[number] = Segment(
                    _path(self._folder, number), self._identity
                )
            if number == self._current:
                continue
            with contextlib.suppress(FileNotFoundError):
                for digest, record in segment.scan():
                    self._index[digest] = _Place(number, record)
                    new.append(digest)
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
                self._index[key.digest] = _Place(number, record)
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

    def close(self) -> None:
        """Let another process write. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self.is_writer = False

    def _read(self, where: _Place, count: int) -> memoryview:
        segment = self._segments.pop(where.segment)
        self._segments[where.segment] = segment  # used now
        try:
            data = segment.read(where.record, count)
            with contextlib.suppress(OSError):
                os.utime(segment.path)
        except FileNotFoundError:  # its writer has removed it
            return memoryview(b"")
        return data

    def _writable(self, num_records: int) -> int:
        """The segment to append so many records to."""
        current = self._current
        if current is not None and _path(self._folder, current).exists():
            segment = self._segments[current]
            size = (segment.num_records + num_records) * self._identity.record_bytes
            if size <= self._segment_bytes:
                return current
        number = 1 + max(_segments_in(self._folder), default=0)
        self._segments[number] = Segment(_path(self._folder, number), self._identity)
        self._current = number
        return number

    def _make_room(self, num_bytes: int) -> list[bytes]:
        """Remove what was used least recently until so many bytes more are allowed."""
        gone: list[bytes] = []
        excess = _size_of(self._root) + num_bytes - self._max_bytes
        if excess > 0:
            excess -= self._remove_others(excess)
        for number in list(self._segments):
            if excess <= 0:
                break
            if number != self._current:
                path = _path(self._folder, number)
                with contextlib.suppress(FileNotFoundError):
                    excess -= path.stat().st_size
                    path.unlink()
                gone += self._forget(number)
        return gone

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
        del self._segments[number]
        gone = [digest for digest, place in self._index.items() if place.segment == number]
        for digest in gone:
            del self._index[digest]
        return gone


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
