"""Host memory: usable, kept alive by whoever views it, and in large pages where it fills some."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import pytest
from torch import Tensor

from quire.kernels.host_memory import (
    LARGE_PAGE_BYTES,
    SHARED_BYTES,
    _Shared,
    empty_bytes,
    empty_weight,
)

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


@pytest.mark.parametrize("num_bytes", [1, 4097, LARGE_PAGE_BYTES + 3])
def test_weights_share_pages_and_no_byte(num_bytes: int) -> None:
    count = SHARED_BYTES // max(num_bytes, LARGE_PAGE_BYTES) + 2  # more than one region holds
    weights = [empty_weight(num_bytes).fill_(each) for each in range(count)]
    assert all(bool((weight == each).all()) for each, weight in enumerate(weights))
    assert all(weight.data_ptr() % mmap.PAGESIZE == 0 for weight in weights)
    assert all(weight.untyped_storage().nbytes() == num_bytes for weight in weights)


def test_a_region_is_given_back_with_its_last_weight() -> None:
    shared = _Shared()
    first, second = shared.take(SHARED_BYTES // 2), shared.take(SHARED_BYTES // 2)
    assert shared._region is not None
    region = weakref.ref(shared._region)
    third = shared.take(1)  # there is no room left for it
    del first
    gc.collect()
    assert region() is not None and second.fill_(3).numel() == SHARED_BYTES // 2
    del second
    gc.collect()
    assert region() is None and third.fill_(1).item() == 1


@pytest.mark.parametrize("num_bytes", [0, SHARED_BYTES, SHARED_BYTES + 1])
def test_a_weight_of_any_size_has_its_memory(num_bytes: int) -> None:
    assert empty_weight(num_bytes).fill_(7).shape == (num_bytes,)


@pytest.mark.skipif(
    not (SMAPS.exists() and hasattr(mmap, "MADV_HUGEPAGE")), reason="asks the Linux kernel"
)
def test_small_weights_lie_in_large_pages() -> None:
    assert "hg" in _flags_of(empty_weight(100))


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
