"""The application: which path leads where, behind the gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from quire.common.loop_lag import LoopLagProbe
from quire.config.api import ApiConfig
from quire.engine.client import EngineClient
from quire.server import static_page
from quire.server.anthropic.messages import CountRequest, MessageRequest, Messages
from quire.server.door import Door
from quire.server.gate import Gate
from quire.server.generation import Tracer
from quire.server.inspector import Inspector
from quire.server.openai.batches import Batches, BatchRequest
from quire.server.openai.chat import ChatCompletions, ChatRequest
from quire.server.openai.completions import CompletionRequest, Completions
from quire.server.openai.file_store import FileStore
from quire.server.openai.files import Files
from quire.server.openai.models import EmbeddingRequest, Models
from quire.server.openai.responses import ResponseRequest, Responses
from quire.server.openapi import UPLOAD, Endpoint, Operation, document
from quire.server.operations import Operations
from quire.server.state import Api
from quire.server.tenants import KeyRing
from quire.server.tokens import DetokenizeRequest, TokenizeRequest, Tokens


def build_app(config: ApiConfig, client: EngineClient, keys: KeyRing, tracer: Tracer | None = None) -> ASGIApp:
    """The ASGI application that serves `client`'s model; `tracer` is told of every generation's end. Raises ConfigError."""
    api = Api(config, client, keys, tracer)
    chat, completions = ChatCompletions(api), Completions(api)
    files = Files(api, None if config.data_folder is None else FileStore(config.data_folder, config.max_stored_file_bytes))
    responses = Responses(api)
    runners = {"/v1/chat/completions": chat.run_body, "/v1/completions": completions.run_body}
    batches = Batches(api, files, {**runners, "/v1/responses": responses.run_body})

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        probe = LoopLagProbe(api.metrics.event_loop_lag)
        probe.start()
        if config.data_folder is not None:
            await batches.resume()
        yield
        await batches.close()
        api.texts.close()
        probe.stop()

    routes = [*_generation_routes(api, chat, completions, responses), *_file_routes(files, batches), *_operation_routes(api)]
    routes.append(_description_of(routes))
    page = [Route(path, static_page.get, methods=["GET"]) for path in static_page.PATHS]
    router = Router([*routes, *page], redirect_slashes=False, lifespan=lifespan)
    return Gate(Door(router, api.admission), config, keys, api.metrics)


def _generation_routes(api: Api, chat: ChatCompletions, completions: Completions, responses: Responses) -> list[Operation]:
    models, tokens, messages = Models(api), Tokens(api), Messages(api)
    return [
        _post("/v1/chat/completions", chat.post, ChatRequest),
        _post("/v1/completions", completions.post, CompletionRequest),
        _post("/v1/embeddings", models.embed, EmbeddingRequest),
        _get("/v1/models", models.list),
        _get("/v1/models/{model:path}", models.get),
        _post("/v1/responses", responses.post, ResponseRequest),
        _get("/v1/responses/{response_id}", responses.get),
        _delete("/v1/responses/{response_id}", responses.delete),
        _get("/v1/responses/{response_id}/input_items", responses.input_items),
        _post("/v1/responses/{response_id}/cancel", responses.cancel),
        _post("/v1/messages", messages.post, MessageRequest),
        _post("/v1/messages/count_tokens", messages.count_tokens, CountRequest),
        _post("/tokenize", tokens.tokenize, TokenizeRequest),
        _post("/detokenize", tokens.detokenize, DetokenizeRequest),
    ]


def _file_routes(files: Files, batches: Batches) -> list[Operation]:
    return [
        _post("/v1/files", files.post, UPLOAD),
        _get("/v1/files", files.list, is_listing=True),
        _get("/v1/files/{file_id}", files.get),
        _delete("/v1/files/{file_id}", files.delete),
        _get("/v1/files/{file_id}/content", files.content),
        _post("/v1/batches", batches.post, BatchRequest),
        _get("/v1/batches", batches.list, is_listing=True),
        _get("/v1/batches/{batch_id}", batches.get),
        _post("/v1/batches/{batch_id}/cancel", batches.cancel),
    ]


def _operation_routes(api: Api) -> list[Operation]:
    operations, inspector = Operations(api), Inspector(api)
    return [
        _get("/inspect/steps", inspector.steps),
        _get("/inspect/blocks/{block}", inspector.block),
        _get("/livez", operations.live),
        _get("/readyz", operations.ready),
        _get("/health", operations.ready),
        _get("/healthz/progress", operations.progress),
        _get("/load", operations.load),
        _get("/version", operations.version),
        _get("/metrics", operations.metrics),
        _get("/v1/usage", operations.usage),
    ]


def _description_of(routes: Sequence[Operation]) -> Operation:
    """The document that describes the others, made when it is first asked for."""
    made: list[bytes] = []

    async def describe(request: Request) -> Response:
        """This document."""
        if not made:
            made.append(await asyncio.to_thread(document, routes))
        return Response(made[0], headers={"content-type": "application/json"})

    return _get("/openapi.json", describe)


def _get(path: str, endpoint: Endpoint, *, is_listing: bool = False) -> Operation:
    return Operation(path, endpoint, methods=["GET"], is_listing=is_listing)


def _post(path: str, endpoint: Endpoint, body: Any = None) -> Operation:
    return Operation(path, endpoint, methods=["POST"], body=body)


def _delete(path: str, endpoint: Endpoint) -> Operation:
    return Operation(path, endpoint, methods=["DELETE"])
