"""uvicorn's servers that end when they are told to, and take no processor time while they wait."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn


class _QuickAsyncio:
    """asyncio as uvicorn's server uses it. It looks for its end every tenth of a second, and again
    for that of its connections, which takes longer than most tests."""

    def __init__(self) -> None:
        self.ends: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Event] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        end = self.ends.setdefault(asyncio.get_running_loop(), asyncio.Event())
        if end.is_set():
            await asyncio.sleep(delay_s / 20)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await end.wait()


_ASYNCIO = _QuickAsyncio()
vars(uvicorn.server)["asyncio"] = _ASYNCIO


def end_soon(server: uvicorn.Server, loop: asyncio.AbstractEventLoop) -> None:
    """Tell a server that runs in this loop to end, from its thread or another one. From then on the
    servers of the loop look for their ends all the time."""
    server.should_exit = True
    loop.call_soon_threadsafe(lambda: _ASYNCIO.ends.setdefault(loop, asyncio.Event()).set())
