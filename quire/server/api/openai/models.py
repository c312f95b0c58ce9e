"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.call import call_of
from quire.server.http.responses import json_response
from quire.server.state import Api


class Models:
    """What is served."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self, request: Request) -> Response:
        """Return all names of the model, and those of its adapters."""
        names = (*self._api.model_names, *(each.name for each in self._api.adapters.all))
        data = [self._entry(name) for name in names]
        return json_response(call_of(request), {"object": "list", "data": data})

    async def get(self, request: Request) -> Response:
        """One of them."""
        name = self._api.check_model(request.path_params["model"])
        return json_response(call_of(request), self._entry(name))

    def _entry(self, name: str) -> dict[str, Any]:
        base, served = self._api.model_names[0], self._api.adapters.find(name)
        return {
            "id": name,
            "object": "model",
            "created": self._api.created if served is None else served.created,
            "owned_by": "quire",
            "root": base if served is None else name,
            "parent": None if served is None else base,
            "max_model_len": self._api.prompts.max_model_len,
        }
