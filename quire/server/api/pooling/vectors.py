"""POST /v1/embeddings, /pooling and /classify: vectors and classes of texts."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.core.pooling import OF_TOKENS, PoolingTask
from quire.engine.front.outputs import RequestOutput
from quire.server.api.pooling.runs import PoolingRuns, VectorFields, floats_of, usage_of
from quire.server.http.body import read_bytes, read_json
from quire.server.http.call import Call, call_of
from quire.server.http.responses import json_response
from quire.server.state import Api

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_T = TypeVar("_T")


class EmbeddingRequest(VectorFields, kw_only=True):
    """The body of an embedding request."""

    encoding_format: Literal["float", "base64"] | None = None
    """None is "float", as clients send it that know no default."""


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """The body of /pooling: `task` says what is made of each input, by default what the model
    makes.
    """

    task: PoolingTask | None = None


class ClassifyRequest(VectorFields, kw_only=True):
    """The body of /classify."""


class Vectors:
    """The endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._runs = PoolingRuns(api)

    async def embed(self, request: Request) -> Response:
        """Vectors of texts, as OpenAI's embeddings."""
        body = await read_json(request, EmbeddingRequest, is_strict=self._api.config.strict_fields)
        call = call_of(request)
        return await self._embed(
            call, body, request.receive, lambda made: json_response(call, made)
        )

    async def run_embed(self, call: Call, body: bytes) -> dict[str, Any]:
        """The answer to a body that did not come by HTTP (a batch's line)."""
        decoded = await read_bytes(call, body, EmbeddingRequest)
        return await self._embed(call, decoded, None, lambda made: made)

    async def pool(self, request: Request) -> Response:
        """What the model makes of texts: a vector, classes, or one of these for each token."""
        body = await read_json(request, PoolingRequest, is_strict=self._api.config.strict_fields)
        call, answer = call_of(request), self._runs.answer(body, "pool")
        task = body.task or self._runs.requests.default_task
        outputs, usage = await self._runs.vectors(call, body, task, request.receive)
        requests, is_many = self._runs.requests, task in OF_TOKENS

        def write() -> Response:
            data = []
            for number, output in enumerate(outputs):
                vectors = requests.vectors(output, task, body.prompt_name)
                shown = _written(vectors if is_many else vectors[0], body.encoding_format)
                data.append({"object": "pooling", "index": number, "data": shown})
            return json_response(
                call, {**answer.envelope(), "data": data, "usage": usage_of(usage)}
            )

        response: Response = await self._runs.written(_num_numbers(outputs), write)
        return response

    async def classify(self, request: Request) -> Response:
        """Probabilities of classes."""
        body = await read_json(request, ClassifyRequest, is_strict=self._api.config.strict_fields)
        call, answer = call_of(request), self._runs.answer(body, "classify")
        labels = self._runs.requests.spec.labels
        outputs, usage = await self._runs.vectors(call, body, "classify", request.receive)

        def write() -> Response:
            data = []
            for number, output in enumerate(outputs):
                probs = floats_of(output)
                best = max(range(len(probs)), key=probs.__getitem__)
                label = labels[best] if labels and len(probs) > 1 else None
                data.append(
                    {"index": number, "label": label, "probs": probs, "num_classes": len(probs)}
                )
            return json_response(
                call, {**answer.envelope(), "data": data, "usage": usage_of(usage)}
            )

        response: Response = await self._runs.written(_num_numbers(outputs), write)
        return response

    async def _embed(
        self,
        call: Call,
        body: EmbeddingRequest,
        receive: Receive | None,
        shown: Callable[[dict[str, Any]], _T],
    ) -> _T:
        answer = self._runs.answer(body, "embd")
        outputs, usage = await self._runs.vectors(call, body, "embed", receive)

        def write() -> _T:
            data = [
                {
                    "object": "embedding",
                    "index": number,
                    "embedding": _shown(output, body.encoding_format),
                }
                for number, output in enumerate(outputs)
            ]
            return shown({**answer.envelope(), "data": data, "usage": usage_of(usage)})

        made: _T = await self._runs.written(_num_numbers(outputs), write)
        return made


def _num_numbers(outputs: list[RequestOutput]) -> int:
    return sum(len(output.pooled or b"") // 4 for output in outputs)


def _shown(output: RequestOutput, form: str | None) -> Any:
    """A vector as the client wants it: base64 is that of little-endian float32."""
    if form == "base64":
        return base64.b64encode(output.pooled or b"").decode()
    return floats_of(output)


def _written(vectors: NDArray[np.float32], form: str | None) -> Any:
    """The same of vectors that were read already, one or many."""
    if form == "base64":
        return base64.b64encode(vectors.astype("<f4").tobytes()).decode()
    return vectors.tolist()
