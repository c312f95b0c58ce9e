"""Addresses of hosts, found within a deadline.

The system's resolver takes none, and the owner of a name may have its server answer slowly. So the
resolver is asked on a thread of its own, which is left to itself when time is up; their number is
bounded. Blocks: for threads.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future

MAX_LOOKUPS = 16
"""At a time, abandoned ones included."""
_FREE = threading.BoundedSemaphore(MAX_LOOKUPS)


def look_up(host: str, port: int, timeout_s: float) -> list[str]:
    """Return the IP addresses of a host.

    Raises OSError where it has none, and TimeoutError, which is one, where they are not found in
    time.
    """
    deadline_s = time.monotonic() + timeout_s
    if not _FREE.acquire(timeout=timeout_s):
        raise TimeoutError(f"{MAX_LOOKUPS} names are being looked up already")
    answer: Future[list[str]] = Future()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.set_result([str(each[4][0]) for each in found])
        except (OSError, ValueError) as error:  # ValueError: names that IDNA cannot encode
            answer.set_exception(error)
        finally:
            _FREE.release()

    try:
        threading.Thread(target=ask, name="quire-lookup", daemon=True).start()
    except RuntimeError as error:  # no thread is to be had
        _FREE.release()
        raise OSError(str(error)) from error
    return answer.result(timeout=max(0.0, deadline_s - time.monotonic()))
