"""Blocks at a byte an element, for a host tier that is to hold more of them than it could as they
are in the pool.

What is restored has other bits than what was computed, by at most half a step of its row. So this
is never the default, and engines that share keys and values must all have it or none. A row is
what one token has in one KV head of one layer, or a part of it where layers differ; its scale is
its largest magnitude over the format's largest number, as in `quire.common.kv_formats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.common.kv_formats import ByteForm

Payload = NDArray[np.uint8]
Source = Literal["bfloat16", "float32"]

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_BITS_OF_BFLOAT16 = np.uint32(16)
_HALF_EXPONENT = np.float32(2.0**-8)
"""By which e4m3's exponents, which are biased by 7, become float16's, which are by 15."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How blocks of one cache are stored."""

    form: ByteForm
    source: Source
    """Of the pool's elements."""
    row_len: int
    """Elements that share a scale."""

    def pack(self, payload: Payload) -> Payload:
        """Return a block of whole rows, [bytes], in about a half or a quarter of its bytes."""
        rows = self._elements(payload).reshape(-1, self.row_len)
        with np.errstate(invalid="ignore", divide="ignore"):  # what lies idle may be anything
            scales = np.abs(rows).max(axis=1) / np.float32(_LARGEST[self.form])
            inverse = np.where(scales > 0.0, np.float32(1.0) / scales, np.float32(0.0))
            scaled = rows * inverse[:, None]
            if self.form == "int8":
                stored = np.rint(scaled, out=scaled).astype(np.int8).view(np.uint8)
            else:
                halves = np.multiply(scaled, _HALF_EXPONENT, out=scaled).astype(np.float16)
                stored = _bytes_of_halves()[halves.view(np.uint16)]
        return np.concatenate([scales.view(np.uint8), stored.reshape(-1)])

    def unpack(self, packed: Payload) -> Payload:
        """Return what was packed, as near as its form allows."""
        num_rows = len(packed) // (self.row_len + 4)
        scales = packed[: 4 * num_rows].view(np.float32)
        stored = packed[4 * num_rows :].reshape(num_rows, self.row_len)
        if self.form == "int8":
            rows = stored.view(np.int8).astype(np.float32)
        else:
            rows = _values_of_bytes()[stored]
        with np.errstate(invalid="ignore", over="ignore"):
            rows *= scales[:, None]
        return self._bytes(rows.reshape(-1))

    def _elements(self, payload: Payload) -> NDArray[np.float32]:
        if self.source == "float32":
            return payload.view(np.float32)
        wide = payload.view(np.uint16).astype(np.uint32)
        return np.left_shift(wide, _BITS_OF_BFLOAT16, out=wide).view(np.float32)

    def _bytes(self, elements: NDArray[np.float32]) -> Payload:
        if self.source == "float32":
            return elements.view(np.uint8)
        bits = elements.view(np.uint32)  # rounded to the nearest, ties to even
        bits += np.uint32(0x7FFF) + ((bits >> _BITS_OF_BFLOAT16) & np.uint32(1))
        halves: NDArray[np.uint16] = (bits >> _BITS_OF_BFLOAT16).astype(np.uint16)
        return halves.view(np.uint8)


def shared_row_len(row_lens: Iterable[int]) -> int:
    """Return elements of the longest rows that all layers' rows consist of."""
    return math.gcd(*row_lens)


@lru_cache(maxsize=1)
def _bytes_of_halves() -> Payload:
    """e4m3 for the bits of each float16 that is 2**-8 times as large, rounded to the nearest."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    magnitude = bits & 0x7FFF
    rounded = (magnitude + 0x3F + (magnitude >> 7 & 1)) >> 7
    stored: Payload = (np.minimum(rounded, 0x7E) | (bits >> 8 & 0x80)).astype(np.uint8)
    return stored


@lru_cache(maxsize=1)
def _values_of_bytes() -> NDArray[np.float32]:
    """The value of each e4m3."""
    bits = np.arange(1 << 8, dtype=np.uint16)
    halves = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).view(np.float16)
    return halves.astype(np.float32) / _HALF_EXPONENT
