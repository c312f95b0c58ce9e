"""T09: whatever is sent to any route, the answer comes in time, is no 5xx, and every error has the
one shape.

Bodies are made in two ways: by schemathesis from the document that the server itself publishes
(values of the right types and of wrong ones), and by mutating bodies that work (truncated, nested,
repeated, of other types, with bytes changed; many prompts and choices, and long lists in several
fields at once, so that what multiplies is multiplied). `mutations` says how to ask for more than
the suite's few seconds of each: a hundred thousand are
`QUIRE_FUZZ_BODIES=100000 python -m pytest -s --timeout 0 tests/server/test_fuzz.py -k mutated`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from large_bodies import CHAT as CHATS
from large_bodies import COMPLETIONS, LISTS, PLAIN, listed, listing_fields, multiplied
from mutations import MAX_WAIT_S, SECONDS, SEED, send_mutated
from plain_http import PlainClient
from served import Served

if TYPE_CHECKING:
    from schemathesis import APIOperation, Case

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {**CHAT, "stop": ["a"], "logit_bias": {"1": 1}, "stream": False, "n": 2, "seed": 1},
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
    ),
    (
        "/v1/completions",
        {"prompt": ["x", "y"], "echo": True, "logprobs": 1, "max_tokens": 3, "best_of": 2},
    ),
    (
        "/v1/completions",
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "allowed_token_ids": [5, 6], "bad_words": ["a"]},
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": "x"}], "text": {}, "max_output_tokens": 2},
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "x"},
                {"type": "reasoning", "content": []},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "quire-storyteller",
            "max_tokens": 3,
            "messages": [{"role": "user", "content": "x"}],
        },
    ),
    (
        "/v1/messages",
        {
            "model": "quire-storyteller",
            "max_tokens": 2,
            "tools": [{"name": "f", "input_schema": {}}],
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}],
                },
            ],
        },
    ),
    (
        "/v1/messages",
        {
            "model": "quire-storyteller",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "x"}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "text", "text": "x"}],
                        },
                    ],
                }
            ],
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"model": "quire-storyteller", "messages": [{"role": "user", "content": "x"}]},
    ),
    ("/v1/embeddings", {"input": ["x"]}),
    (
        "/v1/batches",
        {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    (
        "/tokenize",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}
            ]
        },
    ),
    ("/detokenize", {"tokens": [1, 2]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
                    ],
                }
            ],
            "max_tokens": 2,
        },
    ),
    (
        "/v1/decisions",
        {
            "model": "quire-storyteller",
            "input": "x",
            "questions": [
                {"type": "predicate", "name": "a", "instructions": "x"},
                {"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": 1}]},
                {
                    "type": "score",
                    "instructions": [{"type": "input_text", "text": "x"}],
                    "levels": [{"label": "a"}, {"label": "b", "description": "x"}],
                },
            ],
        },
    ),
    ("/v1/responses/input_tokens", {"input": "x", "instructions": "x"}),
    ("/pooling", {"input": ["x"], "task": "embed"}),
    ("/classify", {"input": ["x"]}),
    ("/v1/score", {"text_1": "x", "text_2": ["x", "y"]}),
    ("/v1/rerank", {"query": "x", "documents": ["x", "y"], "top_n": 1}),
]
_PRODUCTS = 0.1
"""Of all bodies."""
_COUNTS = (*(1,) * 10, *(2, 3) * 3, 17, 17, 64, 512)
_SIZES = (1, 1, 2, 3, 3, 16, 16, 100, 1000, 1 << 18)


@pytest.fixture
def watched(served: Served) -> Iterator[Served]:
    """The server, whose engine must be the same afterwards, and idle."""
    engine = served.engine_pid
    yield served
    served.await_idle()
    assert served.engine_pid == engine
    assert served.progress()["num_restarts"] == 0


def _cases(document: dict[str, Any]) -> st.SearchStrategy[Case[Any]]:
    """Requests of all operations: half of them as the document wants them, half not."""
    import schemathesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(document)
    schema.validate()
    strategies = []
    for result in schema.get_all_operations():
        operation: APIOperation[Any, Any, Any, Any] = result.ok()  # type: ignore[union-attr]
        for mode in GenerationMode:
            if mode is GenerationMode.POSITIVE or operation.body or operation.query:
                strategies.append(operation.as_strategy(mode))
    return st.one_of(strategies)


@pytest.mark.slow
def test_t09_what_the_published_document_allows_and_what_it_forbids(watched: Served) -> None:
    """Also that what the document forbids is refused, so that the document is true."""
    import requests
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
    )

    cases = _cases(watched.get("/openapi.json").json())
    checks = [
        not_a_server_error,
        response_schema_conformance,
        content_type_conformance,
        negative_data_rejection,
    ]
    tried: dict[str, int] = {}
    session = requests.Session()

    def run(case: Case[Any]) -> None:
        tried[case.operation.label] = tried.get(case.operation.label, 0) + 1
        case.headers.pop("x-api-key", None)
        response = case.call(
            base_url=watched.url, session=session, headers=watched.headers, timeout=MAX_WAIT_S
        )
        case.validate_response(response, checks=checks)

    unbounded = list(HealthCheck)
    some = settings(
        max_examples=40,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=unbounded,
        database=None,
    )
    deadline_s = time.monotonic() + SECONDS
    with session:
        for number in range(SEED, SEED + 10_000):
            seed(number)(some(given(cases)(run)))()
            # a busy machine needs longer for as many
            if time.monotonic() > deadline_s and len(tried) > 15:
                break
    assert len(tried) > 15, tried


def test_t09_mutated_bodies(watched: Served) -> None:
    with PlainClient(watched.port, watched.headers, MAX_WAIT_S) as http:
        send_mutated(
            http,
            lambda rng: _product(rng) if rng.random() < _PRODUCTS else rng.choice(SEEDS),
            {200, 400, 404},
        )


def _product(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A route with many prompts or choices, as a rule few of them, and with several lists,
    as a rule short ones."""
    path = rng.choice((COMPLETIONS, COMPLETIONS, CHATS, *PLAIN))
    body = multiplied(path, rng.choice(_COUNTS), rng.choice((1, 1, 1, 2, 4)))
    names = [name for name in listing_fields(path) if name not in body]
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2, 3)))):
        size = min(len(LISTS[name]), rng.choice(_SIZES))
        body = listed(path, name, body, size / len(LISTS[name]))
    return path, body
