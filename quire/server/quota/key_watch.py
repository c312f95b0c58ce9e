"""Keys that change while the server runs: the keys file is looked at again and again, and what it
says counts from then on, for requests that come.

A file that cannot be read or is wrong changes nothing, and is complained of once; so does one that
is gone, since a server with keys never becomes an open one. Requests that have begun keep the
tenant that they came for. A tenant whose rate changes begins with a full allowance.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from quire.errors import ConfigError
from quire.server.quota.admission import AdmissionControl
from quire.server.quota.tenants import KeyRing

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""How often the file is looked at."""


class KeyWatch:
    """Follows the keys file of a ring of keys."""

    def __init__(self, path: str, keys: KeyRing, admission: AdmissionControl) -> None:
        self._path = Path(path)
        self._keys = keys
        self._admission = admission
        self._seen: tuple[int, ...] | None = None
        """The state of the file that was read last; at first none, for it may have changed since
        the server read it."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            fresh = await asyncio.to_thread(self._changed)
            if fresh is not None and self._keys.take_over(fresh):
                self._admission.change(fresh.tenants)
                logger.warning("API keys were read again: %s", fresh)

    def _changed(self) -> KeyRing | None:
        """Return the keys where the file is another than before. In a thread of its own."""
        state: tuple[int, ...]
        try:
            found = os.stat(self._path)
            state = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError as error:
            state = (error.errno or 0,)
        if state == self._seen:
            return None
        self._seen = state
        try:
            return self._keys.read_again()
        except ConfigError as error:
            logger.error("API keys stay as they were: %s", error)
            return None
