"""From a body's texts to vectors: encoded beside the event loop, computed through the generator,
with all its limits.

What every pooling endpoint shares. Vectors stay bytes until an answer is written.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.types import Receive

from quire.core.pooling import MAX_DIMENSIONS, PoolingParams, PoolingTask
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import RequestOutput
from quire.engine.pooling.requests import PoolingRequests
from quire.errors import NotAvailableError, RequestError
from quire.server.api.generation import GenerationJob, Usage
from quire.server.api.openai.completions import Prompt, PromptField, split_prompts
from quire.server.api.prompt_encoder import groups
from quire.server.http.call import Call
from quire.server.http.errors import bad_request, of_prompt
from quire.server.state import Api

_T = TypeVar("_T")
_R = TypeVar("_R")


class PoolingFields(msgspec.Struct, kw_only=True):
    """What the bodies of all pooling endpoints may have."""

    model: str | None = None
    user: Any = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    """Keep so many tokens of each text, -1 as many as the model takes."""
    request_id: Annotated[str, Meta(max_length=128, pattern="^[A-Za-z0-9._:-]+$")] | None = None


class VectorFields(PoolingFields, kw_only=True):
    """The same of those that are given inputs."""

    input: PromptField
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    use_activation: bool | None = None
    prompt_name: Annotated[str, Meta(max_length=128)] | None = None


@dataclass(slots=True)
class Answer:
    """What every answer has."""

    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self) -> dict[str, Any]:
        """The first fields."""
        return {"id": self.id, "object": "list", "created": self.created, "model": self.model}


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` of an answer without tokens."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "total_tokens": usage.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def floats_of(output: RequestOutput) -> list[float]:
    """Return the numbers of an output."""
    data = output.pooled or b""
    return list(struct.unpack(f"<{len(data) // 4}f", data))


class PoolingRuns:
    """Runs pooling requests of one server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @property
    def requests(self) -> PoolingRequests:
        """What the model makes of texts. ApiError 400 where that is nothing."""
        with refusals():
            requests = self._api.client.pooling
            assert requests.spec is not None
            return requests

    def answer(self, body: PoolingFields, prefix: str) -> Answer:
        """The frame of an answer. Raises ApiError 404 for another model."""
        name = self._api.check_model(body.model)
        return Answer(name, f"{prefix}-{body.request_id or token_hex(12)}")

    def split(self, given: PromptField, param: str) -> list[Prompt]:
        """The inputs of a body."""
        return split_prompts(given, self._api.config.max_prompts, param)

    async def vectors(
        self, call: Call, body: VectorFields, task: PoolingTask, receive: Receive | None
    ) -> tuple[list[RequestOutput], Usage]:
        """What the model makes of each input."""
        requests, inputs = self.requests, self.split(body.input, "input")
        params = PoolingParams(
            dimensions=body.dimensions,
            use_activation=body.use_activation,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            prompt_name=body.prompt_name,
        )
        with refusals():
            before = requests.prompt_of(body.prompt_name) if "embed" in task else ""
            num_skipped = requests.texts.num_prompt_tokens(before) if before else 0
            digest = requests.digest(params, task)
            skipping = requests.digest(params, task, num_skipped) if num_skipped else digest
        keep = params.truncate_prompt_tokens
        is_one = inputs[0] is body.input
        places = ["input"] if is_one else [f"input[{each}]" for each in range(len(inputs))]
        written = {
            where: each for where, each in zip(places, inputs, strict=True) if isinstance(each, str)
        }
        with refusals():
            encoded = await self.encode(
                written, lambda text: requests.encode(text, body.prompt_name, keep, task)[0], len
            )
        made = iter(encoded)
        listed = [
            (next(made), skipping) if isinstance(each, str) else (requests.cut(each, keep), digest)
            for each in inputs
        ]
        listed = [(ids, requests.of_role(each, ids, body.prompt_name)) for ids, each in listed]
        return await self.run(call, body, dict(zip(places, listed, strict=True)), receive)

    async def run(
        self,
        call: Call,
        body: PoolingFields,
        prompts: Mapping[str, tuple[list[int], Digest]],
        receive: Receive | None,
    ) -> tuple[list[RequestOutput], Usage]:
        """Compute prompts, named by their places in the body, each as its digest says; outputs in
        order."""
        self._api.choose_model(call, body.model)
        for where, (token_ids, _) in prompts.items():
            self._api.prompts.check_ids(token_ids[: self._api.prompts.max_model_len + 1], where)
        self._check_size(list(prompts.values()))
        jobs = [
            GenerationJob(
                token_ids, digest.params, priority=body.priority, digest=digest, where=where
            )
            for where, (token_ids, digest) in prompts.items()
        ]
        return await self._api.generator.answer(call, jobs, receive)

    def _check_size(self, prompts: Sequence[tuple[list[int], Digest]]) -> None:
        """Refuse vectors that are too many, before the first is computed. Raises ApiError 400."""
        most, num_outputs = self._api.config.max_vector_numbers, self.requests.num_outputs
        num_numbers = sum(
            digest.spec.pool.num_numbers(len(token_ids), num_outputs)
            for token_ids, digest in prompts
            if digest.spec.pool is not None
        )
        if num_numbers > most:
            raise bad_request(
                f"input: the vectors of this request have {num_numbers} numbers ({len(prompts)} "
                f"texts, {sum(len(token_ids) for token_ids, _ in prompts)} tokens), and one "
                f"request may have {most} (max_vector_numbers); give fewer or shorter texts, or "
                "set truncate_prompt_tokens",
                param="input",
                code="answer_too_large",
            )

    async def encode(
        self,
        items: Mapping[str, _T],
        encode: Callable[[_T], _R],
        num_chars: Callable[[_T], int],
    ) -> list[_R]:
        """What becomes of texts (token ids, or beginnings of them), named by their places in the
        body, a group after the other, so that others have their turn."""

        def encode_one(where: str, item: _T) -> _R:
            try:
                return encode(item)
            except RequestError as error:
                raise of_prompt(error, where) from None

        def length(placed: tuple[str, _T]) -> int:
            return num_chars(placed[1])

        found: list[_R] = []
        for group in groups(list(items.items()), length):
            for where, each in group:
                self._api.prompts.check_chars(num_chars(each), where)

            def work(group: Sequence[tuple[str, _T]] = group) -> list[_R]:
                return [encode_one(*each) for each in group]

            found += await self._api.prompts.work(sum(map(length, group)), work)
        return found

    async def written(self, num_numbers: int, write: Callable[[], Any]) -> Any:
        """An answer of so many numbers, made beside the event loop where they are many."""
        return await self._api.prompts.work(16 * num_numbers, write)


@contextmanager
def refusals() -> Iterator[None]:
    """Answer 400 for what this model does not do."""
    try:
        yield
    except NotAvailableError as error:
        raise bad_request(str(error), param="model", code="model_not_supported") from None
