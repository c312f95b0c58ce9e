"""POST /invocations: one path for what several do, as SageMaker wants it.

The body decides: `messages` is a chat, `prompt` a completion, `input` vectors. Everything else is
theirs: bodies, answers, streams and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.server.http.errors import ApiError, bad_request
from quire.server.ops.openapi import Endpoint


class _Kind(msgspec.Struct):
    """The fields that tell what is wanted, undecoded."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Kind)


class InvocationRequest(msgspec.Struct):
    """A chat's, a completion's or an embedding request's body."""

    messages: Any = None
    prompt: Any = None
    input: Any = None


class Invocations:
    """The endpoint."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints` by the field that a body for them has."""
        self._endpoints = endpoints

    async def post(self, request: Request) -> Response:
        """Answer as the endpoint that the body is for: a chat where it has `messages`, a completion
        where it has `prompt`, vectors where it has `input`."""
        try:
            body = await request.body()
            fields = _decoder.decode(body)
        except ClientDisconnect:
            raise ApiError(499, "the client went away") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise bad_request(
                "the request body is not a JSON object", code="invalid_json"
            ) from None
        found = [name for name in self._endpoints if bytes(getattr(fields, name))]
        if len(found) != 1:
            names = ", ".join(self._endpoints)
            raise bad_request(
                f"the body has {len(found)} of the fields {names}; exactly one of them says what "
                "is wanted"
            )
        return await self._endpoints[found[0]](request)
