"""POST /score and /rerank: how well texts go together, by a cross-encoder or by the cosine of
vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.core.pooling import PoolingParams
from quire.engine.pooling.outputs import cosine, vectors_of
from quire.engine.pooling.requests import PoolingRequests
from quire.server.api.generation import Usage
from quire.server.api.pooling.runs import PoolingFields, PoolingRuns, floats_of, refusals, usage_of
from quire.server.http.body import read_bytes, read_json
from quire.server.http.call import Call, call_of
from quire.server.http.errors import bad_request
from quire.server.http.responses import json_response
from quire.server.state import Api

Texts = str | list[str]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class PairFields(PoolingFields, kw_only=True):
    """What /score and /rerank have in common."""

    instruction: Annotated[str, Meta(max_length=1 << 16)] | None = None
    """For models whose template has a place for one; refused by others."""
    use_activation: bool | None = None
    max_tokens_per_query: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """Read so many tokens of each text of this side; 0 and null are all."""


class ScoreRequest(PairFields, kw_only=True):
    """The body of /score: one text and several, or as many; each has three names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class RerankRequest(PairFields, kw_only=True):
    """The body of /rerank, as Jina's and Cohere's clients send it."""

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """The best so many; 0 and null are all."""
    return_documents: bool = True
    instruct: Annotated[str, Meta(max_length=1 << 16)] | None = None
    """Another name of `instruction`."""


class Pairs(list[tuple[str, str]]):
    """Pairs of texts, and where in a body they stand."""

    def __init__(self, first: list[str], second: list[str], places: tuple[str, str]) -> None:
        """`places` name a text's place by its number, which stands for `{}`."""
        super().__init__(zip(first, second, strict=True))
        self._names = places

    @property
    def places(self) -> list[tuple[str, str]]:
        """Where the two texts of each pair stand."""
        first, second = self._names
        return [(first.format(number), second.format(number)) for number in range(len(self))]

    def replaced(self, side: int, texts: Mapping[str, str]) -> Pairs:
        """Return pairs that have other texts on one side, at the same places."""
        sides = [[pair[each] for pair in self] for each in range(2)]
        sides[side] = [texts[text] for text in sides[side]]
        return Pairs(sides[0], sides[1], self._names)

    def distinct(self, side: int) -> dict[str, str]:
        """Each of the texts that come first (0) or second (1), and where it stands at first."""
        places: dict[str, str] = {}
        for pair, where in zip(self, self.places, strict=True):
            places.setdefault(pair[side], where[side])
        return places


class TextScores:
    """The endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._runs = PoolingRuns(api)

    async def score(self, request: Request) -> Response:
        """How well texts go together, one with each of several, or pair by pair."""
        body = await read_json(request, ScoreRequest, is_strict=self._api.config.strict_fields)
        call = call_of(request)
        return json_response(call, await self._score(call, body, request.receive))

    async def run_score(self, call: Call, body: bytes) -> dict[str, Any]:
        """The answer to a batch's line."""
        decoded = await read_bytes(call, body, ScoreRequest)
        return await self._score(call, decoded, None)

    async def rerank(self, request: Request) -> Response:
        """Documents in the order of how well they go with a query."""
        body = await read_json(request, RerankRequest, is_strict=self._api.config.strict_fields)
        call = call_of(request)
        return json_response(call, await self._rerank(call, body, request.receive))

    async def run_rerank(self, call: Call, body: bytes) -> dict[str, Any]:
        """The answer to a batch's line."""
        decoded = await read_bytes(call, body, RerankRequest)
        return await self._rerank(call, decoded, None)

    async def _score(
        self, call: Call, body: ScoreRequest, receive: Receive | None
    ) -> dict[str, Any]:
        answer = self._runs.answer(body, "score")
        pairs = _pairs(body, self._check_count)
        scores, usage = await self._scores(call, body, pairs, receive)
        data = [
            {"index": number, "object": "score", "score": score}
            for number, score in enumerate(scores)
        ]
        return {**answer.envelope(), "data": data, "usage": usage_of(usage)}

    async def _rerank(
        self, call: Call, body: RerankRequest, receive: Receive | None
    ) -> dict[str, Any]:
        answer = self._runs.answer(body, "rerank")
        if not body.documents:
            raise bad_request("documents: the list is empty", param="documents", code="empty_array")
        self._check_count(len(body.documents), "documents")
        body.instruction = body.instruction or body.instruct
        documents = [each if isinstance(each, str) else each.text for each in body.documents]
        pairs = Pairs([body.query] * len(documents), documents, ("query", "documents[{}]"))
        scores, usage = await self._scores(call, body, pairs, receive)
        order = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
        results = []
        for number in order[: body.top_n or None]:
            entry: dict[str, Any] = {"index": number, "relevance_score": scores[number]}
            if body.return_documents:
                entry["document"] = {"text": documents[number]}
            results.append(entry)
        return {
            "id": answer.id, "model": answer.model, "usage": usage_of(usage), "results": results,
        }  # fmt: skip

    def _check_count(self, count: int, param: str) -> None:
        most = self._api.config.max_prompts
        if count > most:
            raise bad_request(
                f"{param}: {count} texts are given; one request may have {most}", param=param
            )

    async def _scores(
        self,
        call: Call,
        body: PairFields,
        pairs: Pairs,
        receive: Receive | None,
    ) -> tuple[list[float], Usage]:
        requests, keep = self._runs.requests, body.truncate_prompt_tokens
        params = PoolingParams(truncate_prompt_tokens=keep, use_activation=body.use_activation)
        requests.check_instruction(body.instruction)
        pairs = await self._shortened(body, pairs)
        if requests.spec.late is not None:
            return await self._late_scores(call, body, pairs, receive)
        if requests.spec.task == "embed":
            return await self._cosines(call, body, pairs, receive)
        if requests.num_outputs != 1:
            raise bad_request(
                f"this model has {requests.num_outputs} classes, and a score is one number; use "
                "/classify",
                param="model", code="model_not_supported",
            )  # fmt: skip
        with refusals():
            digest, texts = requests.digest(params, "score"), requests.texts
        placed = {where: pair for (_, where), pair in zip(pairs.places, pairs, strict=True)}
        encoded = await self._runs.encode(
            placed,
            lambda pair: texts.join(*pair, keep, body.instruction),
            lambda pair: len(pair[0]) + len(pair[1]),
        )
        prompts = {
            where: (token_ids, digest) for where, token_ids in zip(placed, encoded, strict=True)
        }
        outputs, usage = await self._runs.run(call, body, prompts, receive)
        return [floats_of(each)[0] for each in outputs], usage

    async def _shortened(self, body: PairFields, pairs: Pairs) -> Pairs:
        """Return the pairs with so much of each text as is to be read."""
        requests = self._runs.requests
        for side, most in enumerate((body.max_tokens_per_query, body.max_tokens_per_doc)):
            if most:
                known = pairs.distinct(side)
                kept = await self._runs.encode(
                    {where: text for text, where in known.items()},
                    partial(_beginning, requests, most),
                    len,
                )
                pairs = pairs.replaced(side, dict(zip(known, kept, strict=True)))
        return pairs

    async def _late_scores(
        self,
        call: Call,
        body: PairFields,
        pairs: Pairs,
        receive: Receive | None,
    ) -> tuple[list[float], Usage]:
        """MaxSim of queries and documents, each of which is computed once."""
        requests, keep = self._runs.requests, body.truncate_prompt_tokens
        params = PoolingParams(use_activation=body.use_activation)
        digest = requests.digest(params, "token_embed")
        texts = {
            where: (role, text)
            for side, role in enumerate(("query", "document"))
            for text, where in pairs.distinct(side).items()
        }
        with refusals():
            encoded = await self._runs.encode(
                texts,
                lambda each: requests.encode(each[1], each[0], keep, "token_embed")[0],
                lambda each: len(each[1]),
            )
        prompts = {
            where: (token_ids, requests.of_role(digest, token_ids, role))
            for token_ids, (where, (role, _)) in zip(encoded, texts.items(), strict=True)
        }
        outputs, usage = await self._runs.run(call, body, prompts, receive)
        score = requests.late_texts.score

        def compare() -> list[float]:
            vectors = {
                each: requests.vectors(output, "token_embed", each[0])
                for each, output in zip(texts.values(), outputs, strict=True)
            }
            return [score(vectors["query", a], vectors["document", b]) for a, b in pairs]

        num_products = sum(len(output.pooled or b"") for output in outputs) * len(pairs)
        scores: list[float] = await self._runs.written(num_products, compare)
        return scores, usage

    async def _cosines(
        self,
        call: Call,
        body: PairFields,
        pairs: Pairs,
        receive: Receive | None,
    ) -> tuple[list[float], Usage]:
        requests, keep = self._runs.requests, body.truncate_prompt_tokens
        distinct = {**pairs.distinct(0), **pairs.distinct(1)}
        texts = {where: text for text, where in distinct.items()}
        params, before = PoolingParams(use_activation=body.use_activation), requests.prompt_of(None)
        num_skipped = requests.texts.num_prompt_tokens(before) if before else 0
        digest = requests.digest(params, "embed", num_skipped)
        encoded = await self._runs.encode(
            texts, lambda text: requests.encode(text, None, keep, "embed")[0], len
        )
        prompts = {where: (each, digest) for where, each in zip(texts, encoded, strict=True)}
        outputs, usage = await self._runs.run(call, body, prompts, receive)

        def scores() -> list[float]:
            made = (vectors_of(each)[0] for each in outputs)
            vectors = dict(zip(texts.values(), made, strict=True))
            return [cosine(vectors[a], vectors[b]) for a, b in pairs]

        num_numbers = len(pairs) * requests.num_outputs
        made: list[float] = await self._runs.written(num_numbers, scores)
        return made, usage


def _beginning(requests: PoolingRequests, num_tokens: int, text: str) -> str:
    return requests.texts.beginning(text, num_tokens)


def _pairs(body: ScoreRequest, check_count: Callable[[int, str], None]) -> Pairs:
    """The pairs of texts that a body names, not more than `check_count` allows."""
    firsts = {"text_1": body.text_1, "data_1": body.data_1, "queries": body.queries}
    seconds = {"text_2": body.text_2, "data_2": body.data_2, "documents": body.documents}
    (first, place), (second, other) = _only(firsts), _only(seconds)
    check_count(len(first), "text_1")
    check_count(len(second), "text_2")
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise bad_request(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; give one and several, or as "
            "many",
            param="text_2",
        )
    return Pairs(first, second, (place, other))


def _only(given: dict[str, Texts | None]) -> tuple[list[str], str]:
    """The texts that a body has under one of several names, and how their places are written."""
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        names = " or ".join(given)
        raise bad_request(f"give {names}, and only one of them", param=next(iter(given)))
    [(name, value)] = named.items()
    if not value and not isinstance(value, str):
        raise bad_request(f"{name}: the list is empty", param=name, code="empty_array")
    return ([value], name) if isinstance(value, str) else (value, f"{name}[{{}}]")
