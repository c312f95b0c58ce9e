"""Memory for weights and KV caches: anonymous pages, large ones where the system has them."""

from __future__ import annotations

import mmap


def reserve(num_bytes: int) -> mmap.mmap:
    """Return a private region of at least `num_bytes`, zeroed, resident only where it was
    touched."""
    region = mmap.mmap(
        -1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a page fault for every 4 KiB would cost as much as packing
        region.madvise(mmap.MADV_HUGEPAGE)
    return region
