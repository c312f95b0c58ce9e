"""Addresses of hosts, found within a deadline.

The system's resolver takes none, and the owner of a name may have its server answer slowly. So the
resolver is asked on a thread of its own, which is left to itself when time is up, also by a process
that ends (an event loop's own lookups are waited for then); their number is bounded.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Future

MAX_LOOKUPS = 16
"""At a time, abandoned ones included."""
_FREE = threading.BoundedSemaphore(MAX_LOOKUPS)
_POLL_S = 0.01
"""Between two looks of an event loop whether another lookup may begin."""


def look_up(host: str, port: int, timeout_s: float) -> list[str]:
    """Return the IP addresses of a host. Blocks: for threads.

    Raises OSError where it has none, and TimeoutError, which is one, where they are not found in
    time.
    """
    deadline_s = time.monotonic() + timeout_s
    if not _FREE.acquire(timeout=timeout_s):
        raise TimeoutError(f"{MAX_LOOKUPS} names are being looked up already")
    return _begin(host, port).result(timeout=max(0.0, deadline_s - time.monotonic()))


async def addresses_of(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, for an event loop; an address is its own. Can be cancelled
    at any time. Raises OSError where it has none."""
    if _is_address(host):
        return [host]
    while not _FREE.acquire(blocking=False):
        await asyncio.sleep(_POLL_S)
    return await asyncio.wrap_future(_begin(host, port))


def _begin(host: str, port: int) -> Future[list[str]]:
    """Ask the resolver on a thread, which gives the place back that the caller has taken."""
    answer: Future[list[str]] = Future()
    answer.set_running_or_notify_cancel()  # a caller that is cancelled must not cancel this

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.set_result(list(dict.fromkeys(str(each[4][0]) for each in found)))
        except (OSError, ValueError) as error:  # ValueError: names that IDNA cannot encode
            answer.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        finally:
            _FREE.release()

    try:
        threading.Thread(target=ask, name="quire-lookup", daemon=True).start()
    except RuntimeError as error:  # no thread is to be had
        _FREE.release()
        raise OSError(str(error)) from error
    return answer


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return True
    return False
