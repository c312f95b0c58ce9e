"""How long a server holds its event loop: the longest time that /livez waits, less what other work
on the machine took of it.

A wait counts as the processor time that the server's process used meanwhile, if that is less than
the wait itself: what a busy machine takes from the server is none of its doing.
"""

from __future__ import annotations

import threading
from typing import Self

from plain_http import PlainClient
from served import Served, cpu_s

_GRAIN_S = 0.02
"""Two ticks of the system's count of processor time."""
_PAUSE_S = 0.004


class Pauses:
    """Asks one server again and again while the block runs."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="pauses")
        self.longest_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _ask(self) -> None:
        pid = self._served.process.pid
        with PlainClient(self._served.port) as http:
            http.get("/livez")
            while not self._is_over.wait(_PAUSE_S):
                before_s = cpu_s(pid)
                wait_s = http.get("/livez").elapsed_s
                self.longest_s = max(self.longest_s, min(wait_s, cpu_s(pid) - before_s + _GRAIN_S))
