"""Host memory that kernels read through at every step: in large pages where it fills some.

Blocks of a KV cache are scattered, and each piece of one lies in a page of its own; to find a page
of 4 KiB takes a walk through tables that are in no cache. Decoding read 1.1 to 1.4 times the bytes
per second with large ones.

Weights are read from front to back, but in panels side by side, and prefetching ends with a page:
one row times a weight of four bits read 23.3 GB/s from large pages and 19.4 from small ones (one
core of a Zen 3). So weights that fill none themselves share some.
"""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

from quire.common.pages import reserve

LARGE_PAGE_BYTES = 2 << 20
SHARED_BYTES = 32 << 20
"""A region that weights share; it is given back with the last of them, so not much larger."""


def empty_bytes(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], its values unspecified, its pages untouched."""
    if num_bytes < LARGE_PAGE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return torch.frombuffer(reserve(num_bytes), dtype=torch.uint8, count=num_bytes)


class _Shared:
    """Hands out pieces of a region, one after another, and begins another one where it ends. A
    piece begins with a page, so that discarding one (`common.pages.discard`) takes no other's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: mmap.mmap | None = None
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], from 1 to SHARED_BYTES; keeps its region alive."""
        with self._lock:
            if self._region is None or self._used + num_bytes > SHARED_BYTES:
                self._region, self._used = reserve(SHARED_BYTES), 0
            region, first = self._region, self._used
            self._used += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return torch.frombuffer(region, dtype=torch.uint8, offset=first, count=num_bytes)


_shared = _Shared()


def empty_weight(num_bytes: int) -> Tensor:
    """As `empty_bytes`, for what lives as long as a model: where it is smaller than half a region,
    it shares large pages with what was made before and after it."""
    if 0 < num_bytes <= SHARED_BYTES // 2:
        return _shared.take(num_bytes)
    return empty_bytes(num_bytes)


def populate(data: Tensor) -> None:
    """Touch every page of a contiguous tensor whose values do not matter yet."""
    data.view(torch.uint8).view(-1)[:: mmap.PAGESIZE].zero_()
