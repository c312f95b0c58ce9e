"""GET /v1/models, and POST /v1/embeddings for models that can embed,
of which this server has none yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.body import read_json
from quire.server.http.call import call_of
from quire.server.http.errors import bad_request
from quire.server.http.responses import json_response
from quire.server.state import Api


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of an embedding request."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    user: Any = None


class Models:
    """What is served."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self, request: Request) -> Response:
        """Return all names of the model."""
        data = [self._entry(name) for name in self._api.model_names]
        return json_response(call_of(request), {"object": "list", "data": data})

    async def get(self, request: Request) -> Response:
        """One of them."""
        name = self._api.check_model(request.path_params["model"])
        return json_response(call_of(request), self._entry(name))

    async def embed(self, request: Request) -> Response:
        """Refuse, and say why: every model here generates."""
        body = await read_json(request, EmbeddingRequest, is_strict=self._api.config.strict_fields)
        name = self._api.check_model(body.model)
        raise bad_request(
            f"the model {name!r} generates text and does not embed it; use "
            "/v1/chat/completions or /v1/completions",
            param="model",
            code="model_not_supported",
        )

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._api.created,
            "owned_by": "quire",
            "root": self._api.model_names[0],
            "parent": None,
            "max_model_len": self._api.prompts.max_model_len,
        }
