"""Threads on which the library that compiles grammars has room."""

from __future__ import annotations

import threading
from collections.abc import Callable

_STACK_BYTES = 256 << 20
"""The library recurses along chains of references, and a thousand of them overflow 8 MiB's half.
Only what is touched takes memory."""
_lock = threading.Lock()
"""The stack size of new threads is the process's."""


def with_deep_stack(target: Callable[[], None], name: str) -> threading.Thread:
    """Return a thread, started, on which the library's recursion has room."""
    with _lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
