"""The ingress: takes HTTP requests from Serve's proxies, and passes each on to one replica, which
the deployment's request router chooses by what is in the body."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

from quire.common.failures import log_failure
from quire.ray.exchange import Message, Receive, Send, request_of

logger = logging.getLogger(__name__)


class Ingress:
    """What Serve calls a deployment's class."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        """`replicas` is a handle of the replicas' deployment."""
        self._replicas = replicas.options(stream=True, method_name="forward")
        self._max_body_bytes = max_body_bytes

    def __serve_build_asgi_app__(self) -> Any:  # Serve's name
        async def app(scope: Message, receive: Receive, send: Send) -> None:
            await self.answer(scope, receive, send)

        return app  # a function, by which uvicorn knows the version of ASGI

    async def answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            body = await self._body(receive)
            if body is None:
                await _refuse(send, 413, f"the body is larger than {self._max_body_bytes} bytes")
            else:
                await self._pass_on(scope, body, receive, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the whole body; None where it is too long, or its client has left."""
        parts, num_bytes = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > self._max_body_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _pass_on(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        answer, has_begun = self._replicas.remote(request_of(scope, body)), False
        leaving = asyncio.create_task(_wait_for_leaving(receive))
        leaving.add_done_callback(lambda task: task.cancelled() or answer.cancel())
        try:
            async for piece in answer:
                if isinstance(piece, tuple):
                    status, headers = piece
                    head = {"type": "http.response.start", "status": status, "headers": headers}
                    await send(head)
                    has_begun = True
                else:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            answer.cancel()
            raise
        except Exception as error:
            if leaving.done():
                return  # there is no peer to tell
            log_failure(logger, "a replica has not answered", error)
            if has_begun:
                raise  # the connection ends, so that the client sees that the answer is not whole
            await _refuse(send, 503, "no replica can answer now; try again")
        finally:
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving


async def _wait_for_leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, status: int, message: str) -> None:
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode(), "more_body": False})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
