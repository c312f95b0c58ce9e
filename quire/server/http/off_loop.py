"""Work that grows with a body, done beside the event loop: read, checked and written down in one
thread of the process.

One, since such work holds the interpreter's lock: two would only make the loop wait for both. The
interpreter takes the lock from Python code every few milliseconds, but a call into C keeps it to
its end, so the caller bounds what one call is given: a body's bytes, its objects, an answer's
entries. What lets go of the lock (tokenization) has threads of its own
(`quire.server.api.prompt_encoder`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SMALL = 16 << 10
"""Work on fewer bytes, characters or entries is done at once: below about a millisecond, handing
over costs more than it frees.
"""

_T = TypeVar("_T")
_thread = ThreadPoolExecutor(1, thread_name_prefix="quire-bodies")


async def off_loop(size: int, work: Callable[[], _T]) -> _T:
    """Do something whose cost grows with `size`, which counts bytes, characters or entries."""
    if size <= SMALL:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
