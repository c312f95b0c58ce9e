"""Named arithmetic and sizes."""

from typing import Any

import pytest

from quire.common.numbers import align_down, ceil_div, format_bytes, parse_bytes
from quire.errors import ConfigError


def test_division_and_alignment() -> None:
    assert [ceil_div(value, 4) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert ceil_div(10**30 + 1, 10**15) == 10**15 + 1, "no floating point on the way"
    assert [align_down(value, 4) for value in (0, 3, 4, 7)] == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (17, 17), (2e9, 2 * 10**9), ("17", 17), ("17b", 17), ("1k", 1024), ("1KB", 1000), ("1KiB", 1024),
        ("512MiB", 512 << 20), ("1.5g", 3 << 29), (" 2 GB ", 2 * 10**9), ("1TiB", 1 << 40),
    ],
)  # fmt: skip
def test_sizes_are_read(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MiB",
        "1 QB",
        "-1",
        "1e3",
        "1 2",
        True,
        [1],
        1e300,
        float("inf"),
        "9" * 60,
        "0",
        0,
        -5,
        "0MiB",
        "nan",
        "1,5g",
    ],
)
def test_other_sizes_are_refused_by_name_and_value(text: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory=") as caught:
        parse_bytes(text, option="kv_cache_memory")
    assert repr(text) in str(caught.value)


def test_sizes_are_written_for_people() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 5 << 20, 3 << 29, 7 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "1.5 GiB", "7.0 TiB",
    ]  # fmt: skip
