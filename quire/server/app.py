"""The application: which path leads where, behind the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from quire.common.loop_lag import LoopLagProbe
from quire.config.api import ApiConfig
from quire.engine.front.client import Client
from quire.server.api.adapters import AdapterRoutes, LoadAdapterRequest, UnloadAdapterRequest
from quire.server.api.anthropic.messages import (
    CountRequest,
    MessageRequest,
    Messages,
    MessagesQuery,
)
from quire.server.api.decisions import DecisionRequest, DecisionRuns, Decisions
from quire.server.api.generation import Tracer
from quire.server.api.invocations import InvocationRequest, Invocations
from quire.server.api.openai.batches import Batches, BatchRequest
from quire.server.api.openai.chat import ChatCompletions, ChatRequest
from quire.server.api.openai.completions import CompletionRequest, Completions
from quire.server.api.openai.data_folder import DataFolder
from quire.server.api.openai.file_store import FileStore
from quire.server.api.openai.files import Files
from quire.server.api.openai.listing import FileListing, Listing
from quire.server.api.openai.models import Models
from quire.server.api.openai.responses import (
    InputTokensRequest,
    KeptQuery,
    ResponseRequest,
    Responses,
)
from quire.server.api.pooling.scores import RerankRequest, ScoreRequest, TextScores
from quire.server.api.pooling.vectors import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    Vectors,
)
from quire.server.api.systemone import SystemOne, SystemOneRequest
from quire.server.api.tokens import DetokenizeRequest, TokenizeRequest, Tokens
from quire.server.http.gateway import Gateway
from quire.server.http.query import NoQuery
from quire.server.http.quota_check import QuotaCheck
from quire.server.ops import static_page
from quire.server.ops.cache import (
    CacheQuery,
    CacheRoutes,
    ClearQuery,
    KvEventsQuery,
    WarmRequest,
)
from quire.server.ops.inspector import BlockQuery, Inspector, StepsQuery
from quire.server.ops.memory import (
    MemoryRoutes,
    SleepQuery,
    UpdateWeightsRequest,
    WakeUpQuery,
)
from quire.server.ops.openapi import UPLOAD, ApiRoute, Endpoint, document
from quire.server.ops.operations import Operations
from quire.server.quota.key_watch import KeyWatch
from quire.server.quota.tenants import KeyRing
from quire.server.state import Api


def build_app(
    config: ApiConfig, client: Client, keys: KeyRing, tracer: Tracer | None = None
) -> Gateway:
    """Return the ASGI application that serves `client`'s model;
    `tracer` is told of every generation's end. Raises ConfigError."""
    api = Api(config, client, keys, tracer)
    chat, completions = ChatCompletions(api), Completions(api)
    store = (
        None
        if config.data_folder is None
        else FileStore(DataFolder(config.data_folder), config.max_stored_file_bytes)
    )
    files = Files(api, store)
    responses = Responses(api)
    runners = {"/v1/chat/completions": chat.run_body, "/v1/completions": completions.run_body}
    vectors, scores = Vectors(api), TextScores(api)
    runners |= {
        "/v1/responses": responses.run_body,
        "/v1/embeddings": vectors.run_embed,
        "/v1/score": scores.run_score,
        "/v1/rerank": scores.run_rerank,
    }
    batches = Batches(api, files, runners)
    invocations = Invocations(
        {"messages": chat.post, "prompt": completions.post, "input": vectors.embed}
    )

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        probe = LoopLagProbe(api.metrics.event_loop_lag)
        probe.start()
        watch = (
            KeyWatch(config.api_keys_file, keys, api.admission) if config.api_keys_file else None
        )
        if watch is not None:
            watch.start()
        if store is not None:
            batches.resume()
        yield
        if watch is not None:
            watch.stop()
        await batches.close()
        if store is not None:
            store.close()
        api.prompts.close()
        probe.stop()

    routes = [
        *_generation_routes(api, chat, completions, responses),
        *_pooling_routes(vectors, scores),
        *_decision_routes(api),
        *_file_routes(files, batches),
        *_operation_routes(api),
        *_cache_routes(api, chat, completions),
        _post("/invocations", invocations.post, InvocationRequest),
    ]
    routes.append(_description_of(routes))
    page = [Route(path, static_page.get, methods=["GET"]) for path in static_page.PATHS]
    router = Router([*routes, *page], redirect_slashes=False, lifespan=lifespan)
    return Gateway(router, config, keys, api.metrics, QuotaCheck(api.admission))


def _generation_routes(
    api: Api, chat: ChatCompletions, completions: Completions, responses: Responses
) -> list[ApiRoute]:
    models, tokens, messages = Models(api), Tokens(api), Messages(api)
    return [
        _post("/v1/chat/completions", chat.post, ChatRequest),
        _post("/v1/completions", completions.post, CompletionRequest),
        _get("/v1/models", models.list),
        _get("/v1/models/{model:path}", models.get),
        _post("/v1/responses", responses.post, ResponseRequest),
        _post("/v1/responses/input_tokens", responses.input_tokens, InputTokensRequest),
        _get("/v1/responses/{response_id}", responses.get, KeptQuery),
        _delete("/v1/responses/{response_id}", responses.delete),
        _get("/v1/responses/{response_id}/input_items", responses.input_items, Listing),
        _post("/v1/responses/{response_id}/cancel", responses.cancel),
        _post("/v1/messages", messages.post, MessageRequest, MessagesQuery),
        _post("/v1/messages/count_tokens", messages.count_tokens, CountRequest, MessagesQuery),
        _post("/tokenize", tokens.tokenize, TokenizeRequest),
        _post("/detokenize", tokens.detokenize, DetokenizeRequest),
    ]


def _pooling_routes(vectors: Vectors, scores: TextScores) -> list[ApiRoute]:
    return [
        _post("/v1/embeddings", vectors.embed, EmbeddingRequest),
        _post("/pooling", vectors.pool, PoolingRequest),
        _post("/classify", vectors.classify, ClassifyRequest),
        *(_post(path, scores.score, ScoreRequest) for path in ("/score", "/v1/score")),
        *(
            _post(path, scores.rerank, RerankRequest)
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
    ]


def _decision_routes(api: Api) -> list[ApiRoute]:
    runs, is_strict = DecisionRuns(api), api.config.strict_fields
    return [
        _post("/v1/decisions", Decisions(runs, is_strict=is_strict).post, DecisionRequest),
        _post("/v1/systemone", SystemOne(runs, is_strict=is_strict).post, SystemOneRequest),
    ]


def _file_routes(files: Files, batches: Batches) -> list[ApiRoute]:
    return [
        _post("/v1/files", files.post, UPLOAD),
        _get("/v1/files", files.list, FileListing),
        _get("/v1/files/{file_id}", files.get),
        _delete("/v1/files/{file_id}", files.delete),
        _get("/v1/files/{file_id}/content", files.content),
        _post("/v1/batches", batches.post, BatchRequest),
        _get("/v1/batches", batches.list, Listing),
        _get("/v1/batches/{batch_id}", batches.get),
        _delete("/v1/batches/{batch_id}", batches.delete),
        _post("/v1/batches/{batch_id}/cancel", batches.cancel),
    ]


def _operation_routes(api: Api) -> list[ApiRoute]:
    operations, inspector = Operations(api), Inspector(api)
    memory = MemoryRoutes(api.client, api.config)
    adapters = AdapterRoutes(api.adapters, is_strict=api.config.strict_fields)
    return [
        _post("/v1/load_lora_adapter", adapters.load, LoadAdapterRequest),
        _post("/v1/unload_lora_adapter", adapters.unload, UnloadAdapterRequest),
        _post("/sleep", memory.sleep, query=SleepQuery),
        _post("/wake_up", memory.wake_up, query=WakeUpQuery),
        _get("/is_sleeping", memory.is_sleeping),
        _post("/update_weights", memory.update_weights, UpdateWeightsRequest),
        _get("/weight_version", memory.weight_version),
        _get("/inspect/steps", inspector.steps, StepsQuery),
        _get("/inspect/blocks/{block}", inspector.block, BlockQuery),
        _get("/livez", operations.live),
        _get("/readyz", operations.ready),
        _get("/health", operations.ready),
        _get("/ping", operations.ready),
        _get("/healthz/progress", operations.progress),
        _get("/load", operations.load),
        _get("/version", operations.version),
        _get("/metrics", operations.metrics),
        _get("/v1/usage", operations.usage),
    ]


def _cache_routes(api: Api, chat: ChatCompletions, completions: Completions) -> list[ApiRoute]:
    cache = CacheRoutes(
        api.client, chat.run_body, completions.run_body, strict=api.config.strict_fields
    )
    return [
        _post("/v1/cache/warm", cache.warm, WarmRequest),
        _get("/v1/cache", cache.show, CacheQuery),
        ApiRoute("/v1/cache", cache.clear, methods=["DELETE"], query=ClearQuery),
        _get("/v1/kv_events", cache.events, KvEventsQuery),
    ]


def _description_of(routes: Sequence[ApiRoute]) -> ApiRoute:
    """Return the document that describes the others, made when it is first requested."""
    made: list[bytes] = []

    async def describe(request: Request) -> Response:
        """Return this document."""
        if not made:
            made.append(await asyncio.to_thread(document, routes))
        return Response(made[0], headers={"content-type": "application/json"})

    return _get("/openapi.json", describe)


def _get(path: str, endpoint: Endpoint, query: type[Struct] = NoQuery) -> ApiRoute:
    return ApiRoute(path, endpoint, methods=["GET"], query=query)


def _post(
    path: str, endpoint: Endpoint, body: Any = None, query: type[Struct] = NoQuery
) -> ApiRoute:
    return ApiRoute(path, endpoint, methods=["POST"], body=body, query=query)


def _delete(path: str, endpoint: Endpoint) -> ApiRoute:
    return ApiRoute(path, endpoint, methods=["DELETE"])
