"""No body that the API's records allow, and none that they refuse, holds the event loop for longer
than a moment.

Bodies are the products of what multiplies (prompts, choices) and what is listed, each field at its
largest: read off the records, so that a field that comes to them is tried, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from large_bodies import (
    CHAT,
    COMPLETIONS,
    LISTS,
    PLAIN,
    RECORDS,
    listed,
    listing_fields,
    multiplied,
    refused,
)
from pauses import Pauses
from plain_http import PlainClient
from served import Served, resident_bytes, serving
from timing import timed

MAX_PAUSE_S = 0.3
MAX_RISE_BYTES = 96 << 20
OTHERS = {
    CHAT: ("tools",),
    "/v1/responses": ("tools",),
    "/v1/messages": ("tools",),
    "/tokenize": ("tools",),
}
"""Fields of any type that list something."""
REPORTED = {
    "bad words": ({"bad_words": LISTS["bad_words"]}, 512),
    "allowed tokens": ({"allowed_token_ids": LISTS["allowed_token_ids"]}, 512),
    "biases": ({"logit_bias": LISTS["logit_bias"]}, 512),
    "stop tokens": ({"stop_token_ids": LISTS["stop_token_ids"], "min_tokens": 1}, 512),
}


@pytest.fixture(scope="module")
def roomy() -> Iterator[Served]:
    """A server that takes large bodies."""
    with serving("--max-body-bytes", str(8 << 20)) as running:
        running.await_ready()
        with PlainClient(running.port) as http:  # what is loaded once is no cost of a body
            for path, body in PLAIN.items():
                http.post(path, json.dumps(body).encode())
            body = multiplied(COMPLETIONS, 8, 2)
            for name in ("bad_words", "guided_json", "logprob_token_ids"):
                http.post(COMPLETIONS, json.dumps(listed(COMPLETIONS, name, body)).encode())
        yield running


def _longest(served: Served, path: str, body: Any) -> tuple[int, float]:
    """(status, the longest pause while it was answered); of three attempts the best,
    since a collector may come in between."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    best = (0, 1e9)
    for _ in range(3):
        with Pauses(served) as pauses, PlainClient(served.port, timeout_s=100) as http:
            answer = http.post(path, content)
        assert answer.status < 500 and answer.status != 0, (path, answer.content[:300])
        best = min(best, (answer.status, pauses.longest_s), key=lambda each: each[1])
        if best[1] < MAX_PAUSE_S / 2:
            break
    return best


def test_every_field_that_lists_something_has_its_largest_value_here() -> None:
    for path in RECORDS:
        assert set(listing_fields(path)) <= LISTS.keys(), path


@timed
@pytest.mark.parametrize("name", REPORTED)
def test_one_body_of_many_prompts_and_one_long_list_holds_up_nobody_and_costs_little_memory(
    served: Served, name: str
) -> None:
    more, num_prompts = REPORTED[name]
    before = resident_bytes(served.engine_pid)
    content = json.dumps({"prompt": ["x"] * num_prompts, "max_tokens": 1, **more}).encode()
    with Pauses(served) as pauses, PlainClient(served.port, served.headers, 100) as http:
        answer = http.post(COMPLETIONS, content)
    assert answer.status == 200, answer.content[:300]
    assert len(answer.json()["choices"]) == num_prompts
    assert pauses.longest_s < MAX_PAUSE_S
    served.await_idle()
    assert resident_bytes(served.engine_pid) - before < MAX_RISE_BYTES


@pytest.mark.slow
@timed
@pytest.mark.parametrize("path", RECORDS)
def test_no_product_of_what_multiplies_and_what_is_listed_holds_the_loop(
    roomy: Served, path: str
) -> None:
    pauses: dict[str, float] = {}
    num_served = 0
    for name in (*listing_fields(path), *OTHERS.get(path, ())):
        body = listed(path, name, multiplied(path, 64, 2))
        status, pauses[name] = _longest(roomy, path, body)
        num_served += status == 200
    assert max(pauses.values(), default=0.0) < MAX_PAUSE_S, pauses
    if path in (COMPLETIONS, CHAT):
        assert num_served > len(pauses) // 2, (
            "most of what is tried must be accepted, or nothing is tried"
        )
    roomy.await_idle()


@pytest.mark.slow
@timed
@pytest.mark.parametrize("path", RECORDS)
def test_no_body_that_is_refused_for_its_size_holds_the_loop(roomy: Served, path: str) -> None:
    """Each field of megabytes: what is read of it before it is refused is read beside the loop."""
    num_bytes = (3 << 20) if path == COMPLETIONS else 1 << 20
    pauses: dict[str, float] = {}
    for name, body in refused(path, num_bytes):
        _, pauses[f"{name} {type(body.get(name)).__name__}"] = _longest(roomy, path, body)
    assert max(pauses.values()) < MAX_PAUSE_S, pauses
    roomy.await_idle()
