"""Segments: files of stored blocks, all of the same size, written once from front to back.

    segment   header, then records
    header    magic, the cache's identity (32 bytes), tokens and bytes of a block, checksum
    record    magic, place in its sequence, digest, parent's digest, checksum (16 bytes each),
              content ids, payload

The checksum covers whole content ids, of which the record has 32 bits each.

A file says of itself what it is, so that an index can be rebuilt of the files alone. Nothing in it
is believed: a record counts only if its checksum, its digest, its parent and its content ids are
those of the request. A record that was cut off, at whatever byte, is no record. Records have
one length, so that damage to one hides no other. Owns the layout; knows no folder.

The checksum is against damage, not against an enemy, who could write to the folder: BLAKE2 of
everything but the payload, of the payload's CRC-32 and of a multilinear hash of it: the sum of its
64-bit words, each times an odd number of its own, modulo 2^64. The CRC tells the damage that the
sum is weak at (several words that change in their highest bits alone), and the sum all else but for
one chance in 2^64. BLAKE2 of the payload took longer than all else that keeping a block costs (Zen
3, 1.8 MB: 2.2 ms, and 0.5 and 0.15 ms for CRC and sum).
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.content import content_bytes, short_ids
from quire.core.tiers import StoredKey

_MAGIC = b"QuireKV3"
_RECORD_MAGIC, _VOID = b"blok", b"void"
_HEADER = struct.Struct("<8s32sII16s")
_RECORD = struct.Struct("<4sI8x16s16s16s")
_SUMS = struct.Struct("<IQ")
_DIGEST_BYTES = 16
_MAX_PIECES = 512
"""Of one call to write: Linux takes 1,024."""


class CacheIdentity(NamedTuple):
    """What all records of a cache have in common."""

    digest: bytes
    """32 bytes: of everything that decides the bits of keys and values, beside the tokens."""
    block_size: int
    payload_bytes: int
    """Of the blocks of all groups of layers at one place."""

    @property
    def record_bytes(self) -> int:
        """Size of a record."""
        return _RECORD.size + 4 * self.block_size + self.payload_bytes


def header_of(identity: CacheIdentity) -> bytes:
    """What a segment begins with."""
    fields = (_MAGIC, identity.digest, identity.block_size, identity.payload_bytes)
    return _HEADER.pack(*fields, _checksum(_HEADER.pack(*fields, b"")))


HEADER_BYTES = _HEADER.size


def encode(key: StoredKey, payload: memoryview) -> list[bytes | memoryview]:
    """Return a record, in pieces to be written one behind the other."""
    content = array("i", short_ids(key.content_ids)).tobytes()
    head = _RECORD.pack(
        _RECORD_MAGIC, key.place, key.digest, key.parent, _checksum_of(key, payload)
    )
    return [head, content, payload]


def decode(record: memoryview, key: StoredKey) -> memoryview | None:
    """Return the payload of a record if it is what was stored under `key`, to the last bit."""
    content = array("i", short_ids(key.content_ids)).tobytes()
    start = _RECORD.size + len(content)
    if len(record) <= start:
        return None
    payload = record[start:]
    head = (_RECORD_MAGIC, key.place, key.digest, key.parent, _checksum_of(key, payload))
    is_same = record[:start] == _RECORD.pack(*head) + content
    return payload if is_same else None


class RecordHead(NamedTuple):
    """What the index needs to know of a record."""

    digest: bytes
    parent: bytes
    place: int
    """Blocks before it in its sequence."""


class Segment:
    """A file of records."""

    def __init__(self, path: Path, identity: CacheIdentity) -> None:
        self.path = path
        self.num_records = 0
        """That were found, or written, so far."""
        self._identity = identity

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    def scan(self) -> Iterator[tuple[RecordHead, int]]:
        """Yield each record that is new since the last time and wholly there, with its number.
        Raises OSError."""
        with self.path.open("rb", buffering=0) as file:
            if not self.num_records and file.read(HEADER_BYTES) != header_of(self._identity):
                return
            size = self._identity.record_bytes
            count = (os.fstat(file.fileno()).st_size - HEADER_BYTES) // size
            for number in range(self.num_records, count):
                head = os.pread(file.fileno(), _RECORD.size, HEADER_BYTES + number * size)
                if len(head) < _RECORD.size:
                    return
                self.num_records = number + 1
                magic, place, digest, parent, _ = _RECORD.unpack(head)
                if magic == _RECORD_MAGIC:
                    yield RecordHead(digest, parent, place), number

    def append(self, pieces: list[bytes | memoryview], count: int) -> int:
        """Write `count` records in one go; return the place of the first. Raises OSError, behind
        which the file is not to be appended to."""
        first = self.num_records
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        if first == 0:
            flags |= os.O_CREAT | os.O_EXCL
            pieces = [header_of(self._identity), *pieces]
        descriptor = os.open(self.path, flags, 0o600)
        try:
            _write_all(descriptor, pieces)
        finally:
            os.close(descriptor)
        self.num_records += count
        return first

    def read(self, first: int, count: int) -> memoryview:
        """Return records as they lie in the file, or as many bytes as there are. Raises OSError."""
        size = self._identity.record_bytes
        buffer = memoryview(bytearray(count * size))
        with self.path.open("rb", buffering=0) as file:
            file.seek(HEADER_BYTES + first * size)
            done = 0
            while done < len(buffer):
                got = file.readinto(buffer[done:])
                if not got:
                    break
                done += got
        return buffer[:done]

    def void(self, number: int) -> None:
        """Make a record none. Raises OSError."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, _VOID, HEADER_BYTES + number * self._identity.record_bytes)
        finally:
            os.close(descriptor)


def _checksum_of(key: StoredKey, payload: memoryview) -> bytes:
    place = key.place.to_bytes(4, "little")
    content = content_bytes(key.content_ids)
    return _checksum(place, key.digest, key.parent, content, sums_of(payload))


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def sums_of(payload: memoryview) -> bytes:
    """Return CRC and sum of a payload, 12 bytes; see above."""
    count, rest = divmod(len(payload), 8)
    words, factors = np.frombuffer(payload, "<u8", count), _factors(count + 1)
    last = int.from_bytes(payload[8 * count :], "little") if rest else 0
    total = int(np.dot(words, factors[:count])) + last * int(factors[count])
    return _SUMS.pack(zlib.crc32(payload), total % (1 << 64))


@lru_cache(maxsize=4)
def _factors(count: int) -> NDArray[np.uint64]:
    """Return odd numbers that look random, the same in every process."""
    drawn = hashlib.shake_256(b"quire: factors of words").digest(8 * count)
    return np.frombuffer(drawn, "<u8") | np.uint64(1)


def _write_all(descriptor: int, pieces: list[bytes | memoryview]) -> None:
    """Write everything, in as few calls as the system takes."""
    left = deque(memoryview(piece) for piece in pieces)
    while left:
        done = os.writev(descriptor, list(islice(left, _MAX_PIECES)))
        while left and done >= len(left[0]):
            done -= len(left.popleft())
        if done:
            left[0] = left[0][done:]
