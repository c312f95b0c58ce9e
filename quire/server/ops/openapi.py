"""GET /openapi.json: what this server understands, as an OpenAPI document made from the very types
that judge the requests.

Owns the document's shape. Nothing in it is written by hand twice: paths and methods come from the
routes, bodies from the records that decode them, words from docstrings. It says nothing of the
model, its folder or the operator's settings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import quire
from quire.server.http.call import call_of
from quire.server.http.query import NoQuery, read_query

Endpoint = Callable[[Request], Awaitable[Response]]
Document = dict[str, Any]

_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_REF = "#/components/schemas/{name}"
_PUBLIC = ("/livez", "/readyz", "/ping")
_ERROR: Document = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
    "additionalProperties": False,
}
_ENVELOPES: Document = {
    "ErrorBody": _ERROR,
    "Error": {
        "description": "What every error is answered with.",
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"$ref": "#/components/schemas/ErrorBody"}},
        "additionalProperties": False,
    },
    "AnthropicError": {
        "description": "The same in the envelope that Anthropic's clients read.",
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {"$ref": "#/components/schemas/ErrorBody"},
            "request_id": {"type": "string"},
        },
        "additionalProperties": False,
    },
}
UPLOAD: Document = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string"},
    },
}
"""The form of an upload, which is no record of JSON."""


class ApiRoute(Route):
    """A route, what its body is (a record that decodes JSON, `UPLOAD`, or nothing),
    and the record of its query."""

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        methods: list[str],
        body: Any = None,
        query: type[msgspec.Struct] = NoQuery,
    ) -> None:
        super().__init__(path, _with_query(endpoint, query), methods=methods)
        self.body_kind = body
        self.query_kind = query


def _with_query(endpoint: Endpoint, kind: type[msgspec.Struct]) -> Endpoint:
    """Return the endpoint behind a judge of its query, whose findings every answer names,
    whatever it is made of."""

    @functools.wraps(endpoint)
    async def judged(request: Request) -> Response:
        read_query(request.scope, kind)
        call = call_of(request)
        has_unknown = bool(call.ignored_fields)
        response = await endpoint(request)
        if has_unknown:
            response.headers.update(call.response_headers())
        return response

    return judged


def document(operations: Sequence[ApiRoute]) -> bytes:
    """Return the document, as JSON."""
    kinds = list({each.body_kind: None for each in operations if isinstance(each.body_kind, type)})
    references, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    bodies = dict(zip(kinds, references, strict=True))
    paths: dict[str, Document] = {}
    for operation in operations:
        for method in sorted((operation.methods or set()) - {"HEAD"}):
            path = _PARAMETER.sub(r"{\1}", operation.path)
            paths.setdefault(path, {})[method.lower()] = _describe(operation, method, bodies)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Quire", "version": quire.__version__},
            "paths": paths,
            "components": {"schemas": {**components, **_ENVELOPES}, "securitySchemes": schemes},
        }
    )


def _describe(operation: ApiRoute, method: str, bodies: dict[Any, Any]) -> Document:
    names = _PARAMETER.findall(operation.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]
    summary = (operation.endpoint.__doc__ or "").strip().split("\n")[0]
    error = "AnthropicError" if operation.path.startswith("/v1/messages") else "Error"
    described: Document = {
        "operationId": f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', operation.path)}".rstrip(
            "_"
        ),
        "summary": summary,
        "parameters": [*parameters, *_query_parameters(operation.query_kind)],
        "responses": {
            "200": {"description": "The result; a stream of events where `stream` is true."},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": _REF.format(name=error)}}},
            },
        },
        "security": [] if operation.path in _PUBLIC else [{"bearer": []}, {"header": []}],
    }
    if operation.body_kind is not None:
        described["requestBody"] = {
            "required": True,
            "content": _content(operation.body_kind, bodies),
        }
    return described


def _query_parameters(kind: type[msgspec.Struct]) -> list[Document]:
    properties: Document = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]


def _content(kind: Any, bodies: dict[Any, Any]) -> Document:
    if kind is UPLOAD:
        return {"multipart/form-data": {"schema": UPLOAD}}
    return {"application/json": {"schema": bodies[kind]}}
