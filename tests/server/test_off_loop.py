"""What grows with a body is read once and beside the event loop, and bounded before it is made."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import msgspec
import pytest
from fake_client import FakeClient, Script
from servers import RunningServer, serve

from quire.core.params import SamplingParams
from quire.engine.front.digest import Digest
from quire.server.api.openai import completions, logprobs
from quire.server.api.openai import fields as fields_module
from quire.server.api.openai.completions import CompletionRequest, split_prompts
from quire.server.http import body as bodies
from quire.server.http.body import decode
from quire.server.http.errors import ApiError
from quire.server.http.off_loop import SMALL, off_loop

NUM_PROMPTS = 100


def test_small_work_is_done_at_once_and_other_work_in_one_thread() -> None:
    async def run() -> list[str]:
        here = [await off_loop(SMALL, lambda: threading.current_thread().name)]
        there = [off_loop(SMALL + 1, lambda: threading.current_thread().name) for _ in range(5)]
        return here + list(await asyncio.gather(*there))

    here, *there = asyncio.run(run())
    assert here == threading.current_thread().name and set(there) == {"quire-bodies_0"}


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": ["a word"] * 256},
        {"allowed_token_ids": [5] * 20_000},
        {"logit_bias": {"5": 1.0}},
        {"stop": ["one", "two"]},
        {"guided_choice": ["a", "b"]},
    ],
)
def test_the_parameters_of_many_prompts_are_made_and_read_once(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    plain = fields_module.sampling_params

    def sampling_params(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        return plain(*args, **kwargs)

    read: list[Digest] = []

    class Client(FakeClient):
        def digest(self, params: SamplingParams) -> Digest:
            read.append(super().digest(params))
            return read[-1]

    client = Client()
    monkeypatch.setattr(completions, "sampling_params", sampling_params)
    with serve(client) as server:
        prompts = ["Once upon a time"] * (NUM_PROMPTS - 1) + [[5] * 505]
        answer = httpx.post(
            server.url + "/v1/completions", json={"prompt": prompts, **fields}, timeout=60
        )
    assert answer.status_code == 200, answer.text
    assert len(made) == len(read) == 1
    assert {id(request.digest.sampling) for request in client.requests} == {id(read[0].sampling)}
    assert [request.params.max_tokens for request in client.requests[-2:]] == [16, 7], (
        "what the prompt leaves room for"
    )
    assert len({id(request.params) for request in client.requests}) <= 2
    assert all(request.params.lists_the_same(read[0].params) for request in client.requests)


def test_a_body_of_too_many_objects_is_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_PARTS", 100)

    def no_decoder(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is to be made of it")

    with monkeypatch.context() as patched:
        patched.setattr(msgspec.json, "decode", no_decoder)
        with pytest.raises(ApiError, match="more than 100 objects, lists and fields"):
            decode(json.dumps({"prompt": "x", "tools": [{}] * 100}).encode(), CompletionRequest)
    # what stands in texts does not count
    texts = {"prompt": '{[:"\\' * 100, "user": "{" * 200, "tools": [{}] * 90}
    decoded, unknown = decode(json.dumps(texts).encode(), CompletionRequest)
    assert decoded.prompt == texts["prompt"] and not unknown


def test_what_stands_between_strings_is_counted_as_a_decoder_would() -> None:
    values: list[Any] = [
        {},
        {"a": 1},
        {"\\": {'"': ['"{[:', "\\\\"]}},
        [[], [{}]],
        {'\\"{': {"b\\": ':\\"'}},
    ]
    for value in values:
        assert bodies._num_parts(json.dumps(value).encode()) == _parts(value), value


def _parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_parts, value.values()))
    return 1 + sum(map(_parts, value)) if isinstance(value, list) else 0


def test_too_many_prompts_are_refused_unread() -> None:
    with pytest.raises(ApiError, match="1000000 prompts are given; one request may have 512"):
        split_prompts([None] * 1_000_000, 512)
    assert split_prompts([5] * 1_000_000, 512) == [[5] * 1_000_000]


def test_what_an_answer_repeats_is_bounded(http: httpx.Client) -> None:
    body = {"prompt": "a" * 100_000, "truncate_prompt_tokens": 10, "max_tokens": 1, "n": 4}
    assert http.post("/v1/completions", json={**body, "echo": True}).status_code == 200, (
        "what is truncated is not repeated"
    )


def test_the_first_events_of_a_long_prompts_scores_are_made_beside_the_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []
    plain = logprobs.prompt_logprobs

    def watched(records: Any) -> Any:
        places.append(threading.current_thread().name)
        return plain(records)

    monkeypatch.setattr(completions, "prompt_logprobs", watched)
    body = {
        "prompt": [5] * 100,
        "max_tokens": 4,
        "ignore_eos": True,
        "prompt_logprobs": 5,
        "stream": True,
        "n": 2,
    }
    answer = httpx.post(server.v1 + "/completions", json=body, timeout=60)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    assert len(places) == 1 and places[0].startswith("quire-bodies"), "once for all choices"


def test_running_usage_counts_what_it_would_count_at_the_end() -> None:
    with serve(FakeClient(Script(pieces=("a", "b", "c")))) as server:
        body = {"prompt": ["x", "y"], "n": 2, "stream": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = httpx.post(
            server.v1 + "/completions", json={**body, "stream_options": options}, timeout=60
        )
    chunks = [
        json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")
    ]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 2 * 2 * 3
