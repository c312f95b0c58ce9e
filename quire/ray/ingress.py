"""The ingress: takes HTTP requests from Serve's proxies, and passes each on to one replica, which
the deployment's request router chooses by what is in the body."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from starlette.requests import ClientDisconnect

from quire.common.failures import log_failure
from quire.config.api import ApiConfig
from quire.ray.exchange import Message, Receive, Send, request_of
from quire.server.http.body import read_body
from quire.server.http.errors import ApiError

logger = logging.getLogger(__name__)
_NO_REPLICA = ApiError(
    503, "no replica can answer now; try again", code="no_replica", headers={"retry-after": "1"}
)


class Ingress:
    """What Serve calls a deployment's class."""

    def __init__(self, replicas: Any, api: ApiConfig) -> None:
        """`replicas` is a handle of the replicas' deployment."""
        self._replicas = replicas.options(stream=True, method_name="forward")
        self._api = api

    def __serve_build_asgi_app__(self) -> Any:  # Serve's name
        async def app(scope: Message, receive: Receive, send: Send) -> None:
            await self.answer(scope, receive, send)

        return app  # a function, by which uvicorn knows the version of ASGI

    async def answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            try:
                body = await read_body(
                    receive,
                    max_bytes=self._api.max_body_bytes,
                    timeout_s=self._api.body_timeout_s,
                )
            except ApiError as error:
                await _refuse(send, error)
            except ClientDisconnect:
                return  # there is no peer to tell
            else:
                await self._pass_on(scope, body, receive, send)

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
            await _refuse(send, _NO_REPLICA)
        finally:
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving


async def _wait_for_leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, error: ApiError) -> None:
    headers = {"content-type": "application/json", **error.headers}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": error.encode(), "more_body": False})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
