"""Bodies as large as the API takes them: what multiplies a body, what it may list, and the product
of both.

`LISTS` holds, for each field that lists something, the longest value that is accepted;
`listing_fields` reads off a record's types which fields these are, so that a test can tell of one
that nobody has thought of. `refused` makes values that are longer than anything accepted, out of
the types alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.inspect import (
    AnyType,
    DictType,
    Field,
    ListType,
    StructType,
    Type,
    UnionType,
    type_info,
)

from quire.server.api.anthropic.messages import CountRequest, MessageRequest
from quire.server.api.openai.batches import BatchRequest
from quire.server.api.openai.chat import ChatRequest
from quire.server.api.openai.completions import CompletionRequest
from quire.server.api.openai.responses import ResponseRequest
from quire.server.api.pooling.vectors import EmbeddingRequest
from quire.server.api.tokens import DetokenizeRequest, TokenizeRequest

MODEL = "quire-storyteller"
VOCAB_SIZE = 400
"""Fewer ids than the model has."""
COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
RECORDS: dict[str, type[msgspec.Struct]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    RESPONSES: ResponseRequest,
    MESSAGES: MessageRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/batches": BatchRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_SAID = [{"role": "user", "content": "x"}]
PLAIN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    CHAT: {"messages": _SAID, "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1, "store": False},
    MESSAGES: {"model": MODEL, "max_tokens": 1, "messages": _SAID},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": _SAID},
    "/v1/embeddings": {"input": "x"},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"},
    "/tokenize": {"messages": _SAID},
    "/detokenize": {"tokens": [5]},
}
"""The smallest body of each route."""


def _words(count: int, length: int) -> list[str]:
    rng = random.Random(count)
    return [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ ", k=length)) + "."
        for _ in range(count)
    ]


def _tool(number: int, **fields: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {f"field {place}": {"type": "string"} for place in range(20)},
    }
    return {"name": f"f{number}", "description": "a " * 100, **fields, "parameters": schema}


_FORM = {
    "type": "object",
    "properties": {f"p{number}": {"enum": [f"a{number}", f"b{number}"]} for number in range(500)},
}
_PARTS = [{"type": "text", "text": "a"}]
LISTS: dict[str, Any] = {
    "stop": _words(4, 1000),
    "stop_sequences": _words(16, 1000),
    "logit_bias": {str(number): 0.5 for number in range(VOCAB_SIZE)}
    | {f"{number:010}": 0.5 for number in range(1600)},
    "stop_token_ids": [number % VOCAB_SIZE for number in range(4096)],
    "allowed_token_ids": [number % VOCAB_SIZE for number in range(1 << 18)],
    "logprob_token_ids": list(range(128)),
    "bad_words": _words(256, 255),
    "guided_choice": _words(10_000, 20),
    "guided_json": _FORM,
    "structured_outputs": {"json": _FORM},
    "repetition_detection": {"max_pattern_size": 1024, "min_count": 2},
    "messages": [{"role": "user", "content": _PARTS * 4}] * 4096,
    "system": _PARTS * 20_000,
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 4}] * 4096,
    "documents": [{"text": "a " * 100}] * 1024,
    "chat_template_kwargs": {f"k{number}": number for number in range(20_000)},
    "tools": [{"type": "function", "function": _tool(number)} for number in range(128)],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": list(range(1 << 16))}
    | {f"k{number}": number for number in range(20_000)},
    "metadata": {f"k{number}": "v" * 20 for number in range(16)},
    "tokens": [5] * (1 << 16),
    "prompt": [[5] * 300] * 512,
    "include": ["message.output_text.logprobs"],
    "modalities": ["text"],
    "reasoning": {"effort": "low"},
    "thinking": {"type": "disabled"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": _FORM}},
    "output_config": {"format": {"type": "json_schema", "schema": _FORM}},
}
"""By field: the longest value that is accepted, or nearly so."""
WITH: dict[str, dict[str, Any]] = {
    "logprob_token_ids": {"logprobs": 1},
    "stop_token_ids": {"min_tokens": 1},
    "documents": {},
}
"""What a field must come with."""


def listing_fields(path: str) -> Iterator[str]:
    """The fields of a route's record whose type is a list or a mapping."""
    info = type_info(RECORDS[path])
    assert isinstance(info, StructType)
    for each in info.fields:
        if any(isinstance(option, ListType | DictType) for option in _options(each.type)):
            yield each.encode_name


def multiplied(path: str, num_prompts: int, num_choices: int) -> dict[str, Any]:
    """A route's smallest body, with as many prompts and choices, where it can have them."""
    body = dict(PLAIN[path])
    if path == COMPLETIONS:
        body |= {"prompt": ["x"] * num_prompts, "n": num_choices}
    elif path == CHAT:
        body |= {"n": min(128, num_prompts * num_choices)}
    return body


def listed(path: str, name: str, body: Mapping[str, Any], share: float = 1.0) -> dict[str, Any]:
    """A body with a share of the longest value of a field."""
    more = WITH.get(name, {})
    if path == CHAT and "logprobs" in more:
        more = {"logprobs": True}
    value = LISTS[name]
    if path == RESPONSES and name == "tools":
        value = [{"type": "function", **_tool(number)} for number in range(128)]
    elif path.startswith(MESSAGES) and name == "tools":
        value = [{"name": f"f{number}", "input_schema": _FORM} for number in range(64)]
    size = max(1, int(share * len(value)))
    if isinstance(value, list):
        value = value[:size]
    elif name in ("logit_bias", "metadata", "chat_template_kwargs"):
        value = dict(list(value.items())[:size])
    return {**body, **more, name: value}


def refused(path: str, num_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies in which a field is longer than anything that is accepted: each that a request is made
    of, of the others one of each type that can be long.
    """
    info = type_info(RECORDS[path])
    assert isinstance(info, StructType)
    seen: set[str] = set()
    for each in sorted(info.fields, key=lambda field: field.encode_name not in PLAIN[path]):
        if each.encode_name in PLAIN[path] or str(each.type) not in seen:
            seen.add(str(each.type))
            for value in _long_values(each, num_bytes):
                yield each.encode_name, {**PLAIN[path], each.encode_name: value}
    yield "unknown", {**PLAIN[path], "unknown": [{"a": {}}] * (num_bytes // 10)}
    yield (
        "unknowns",
        {**PLAIN[path], **{f"unknown {number}": 1 for number in range(num_bytes // 16)}},
    )


def _long_values(field: Field, num_bytes: int) -> Iterator[Any]:
    for option in _options(field.type):
        if isinstance(option, AnyType):
            yield [{"a": {}}] * (num_bytes // 10)
            yield {str(number): [] for number in range(num_bytes // 10)}
        elif isinstance(option, ListType):
            item = _small(option.item_type)
            yield [item] * (num_bytes // (len(json.dumps(item)) + 2))
        elif isinstance(option, DictType):
            item = _small(option.value_type)
            yield {str(number): item for number in range(num_bytes // (len(json.dumps(item)) + 10))}
        elif type(option).__name__ == "StrType" and getattr(option, "pattern", None) is None:
            yield "ab c" * (num_bytes // 4)


def _small(kind: Type) -> Any:
    option = _options(kind)[0]
    name = type(option).__name__
    if isinstance(option, StructType):
        return _SAID[0]
    return {"StrType": "a", "IntType": 5, "FloatType": 0.5, "DictType": {}, "ListType": []}.get(
        name, {}
    )


def _options(kind: Type) -> tuple[Type, ...]:
    kind = kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind
    return tuple(kind.types) if isinstance(kind, UnionType) else (kind,)
