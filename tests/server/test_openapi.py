"""The published document names every route but itself, and every field that a body may have."""

from __future__ import annotations

import httpx
from fake_client import FakeClient
from servers import routes_of, serve

from quire.config.api import ApiConfig
from quire.server.api.openai.chat import ChatRequest
from quire.server.app import build_app
from quire.server.ops.static_page import PATHS as PAGE_PATHS
from quire.server.quota.tenants import key_ring


def test_it_describes_what_is_served() -> None:
    routes = routes_of(build_app(ApiConfig(), FakeClient(), key_ring([])))
    with serve(FakeClient()) as server:
        document = httpx.get(f"{server.url}/openapi.json").json()
    assert {*document["paths"], "/openapi.json", *PAGE_PATHS} == {
        route.path.replace(":path", "") for route in routes
    }
    assert set(document["components"]["schemas"]["ChatRequest"]["properties"]) == set(
        ChatRequest.__struct_encode_fields__
    )
    names = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]
    assert len(set(names)) == len(names)
    assert (
        document["paths"]["/livez"]["get"]["security"]
        == []
        != document["paths"]["/metrics"]["get"]["security"]
    )
    assert "/nowhere" not in str(document), "the model's folder is not for clients"
