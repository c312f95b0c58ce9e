"""Memory for weights and KV caches: anonymous pages, large ones where the system has them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

CAN_DISCARD = sys.platform == "linux"
"""Elsewhere discarded pages may keep their values, and may stay resident."""
_MADV_DONTNEED = 4


def reserve(num_bytes: int) -> mmap.mmap:
    """Return a private region of at least `num_bytes`, zeroed, resident only where it was
    touched."""
    region = mmap.mmap(
        -1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a page fault for every 4 KiB would cost as much as packing
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


def discard(address: int, num_bytes: int) -> int:
    """Give the whole pages of a region of private anonymous memory back to the system; returns
    their bytes. Until they are written again they read as zero. Raises OSError."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + num_bytes) // page * page
    if first >= end:
        return 0
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return end - first
