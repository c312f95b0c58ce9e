"""What is closed before the interpreter ends."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

from quire.common import threads


class _Owner:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_those_that_several_threads_register_at_once_are_all_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second comes while the first looks through those that are there."""
    first, second = _Owner(), _Owner()
    other = threading.Thread(target=threads.close_at_exit, args=(second,))

    def look() -> None:
        if not other.ident:
            other.start()
            other.join(0.5)

    registered: list[Any] = [look]
    monkeypatch.setattr(threads, "_open", registered)
    threads.close_at_exit(first)
    other.join()
    assert [each() for each in registered if isinstance(each, weakref.ref)] == [first, second]
    threads._close_all()
    assert first.is_closed and second.is_closed and not registered
