"""Ends threads before the interpreter.

A daemon thread that returns from native code to an interpreter that is being finalized is ended by
unwinding its stack, which C++ answers with `std::terminate`: a script that left an engine open
would end with SIGABRT behind its last line.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from typing import Protocol


class Closable(Protocol):
    """Owns a thread."""

    def close(self) -> None:
        """End the thread, within a time. Idempotent."""
        ...


_open: list[weakref.ref[Closable]] = []
_changing = threading.RLock()
"""Guards `_open`. What is collected meanwhile may register others."""


def close_at_exit(owner: Closable) -> None:
    """Close an object when the interpreter exits, those first that were registered first: whose
    thread uses another's has begun before it."""
    with _changing:
        if not _open:
            atexit.register(_close_all)
        _open[:] = [each for each in _open if each() is not None]
        _open.append(weakref.ref(owner))


def _close_all() -> None:
    while True:
        with _changing:
            if not _open:
                return
            owner = _open.pop(0)()
        if owner is not None:
            with contextlib.suppress(Exception):  # too late to report
                owner.close()
