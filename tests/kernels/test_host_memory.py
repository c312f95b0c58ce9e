"""Host memory: usable, kept alive by whoever views it, and in large pages where it fills some."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
from torch import Tensor

from quire.kernels.host_memory import LARGE_PAGE_BYTES, empty_bytes

SMAPS = Path("/proc/self/smaps")


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, LARGE_PAGE_BYTES, LARGE_PAGE_BYTES + 3])
def test_memory_is_kept_by_what_views_it(num_bytes: int) -> None:
    view = empty_bytes(num_bytes)[: num_bytes // 2].view(-1)
    gc.collect()
    view.fill_(7)
    assert view.shape == (num_bytes // 2,) and bool((view == 7).all()) and not view.is_pinned()


@pytest.mark.skipif(
    not (SMAPS.exists() and hasattr(mmap, "MADV_HUGEPAGE")), reason="asks the Linux kernel"
)
def test_large_pages_are_asked_for_where_they_are_filled() -> None:
    large, small = empty_bytes(2 * LARGE_PAGE_BYTES), empty_bytes(LARGE_PAGE_BYTES - 1)
    assert "hg" in _flags_of(large) and "hg" not in _flags_of(small)


def _flags_of(tensor: Tensor) -> list[str]:
    """What the kernel notes of the mapping that a tensor lies in."""
    address, is_inside = tensor.data_ptr(), False
    for line in SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, end = (int(each, 16) for each in head.split("-"))
            is_inside = first <= address < end
        elif is_inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping holds the tensor")
