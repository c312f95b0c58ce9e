"""Small files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from quire.common.small_files import write_whole


def test_a_file_is_replaced_as_a_whole_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    for text in ("[1, 2, 3]", "[]"):
        write_whole(path, text)
        assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_what_cannot_be_completed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "numbers.json"
    write_whole(path, "[1]")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_whole(path, "[2]")
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "[1]"
