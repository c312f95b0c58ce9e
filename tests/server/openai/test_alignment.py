"""Token ids and log-probabilities over HTTP are those of the engine offline, one for one,
however an answer ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import MODEL

from quire import LLM, SamplingParams

PROMPT = "Once upon a time"
ENDS: dict[str, dict[str, Any]] = {
    "the end of the sequence": {"logit_bias": {"2": 100}, "min_tokens": 5},
    "a stop string": {"stop": "there"},
    "a stop string that takes several tokens": {"stop": "e was a l"},
    "a stop token": {"stop_token_ids": [300], "logit_bias": {"300": 100}, "min_tokens": 3},
    "the limit": {},
}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, num_threads=1, kv_cache_memory="48MiB") as llm:
        yield llm


def answer_of(
    http: httpx.Client, path: str, end: str, *, is_stream: bool
) -> tuple[list[int], list[Any], int]:
    """Token ids (of Responses, which has none, nothing), log-probabilities,
    and how many tokens the usage counts."""
    fields: dict[str, Any] = {"temperature": 0, "stream": is_stream, **ENDS[end]}
    if path == "/v1/responses":
        fields |= {"input": PROMPT, "max_output_tokens": 12, "top_logprobs": 1}
    else:
        fields |= {"max_tokens": 12, "return_token_ids": True, "logprobs": path[4:6] == "ch" or 1}
        fields |= (
            {"messages": [{"role": "user", "content": PROMPT}]}
            if path[4:6] == "ch"
            else {"prompt": PROMPT}
        )
        fields |= {"stream_options": {"include_usage": True}} if is_stream else {}
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    events = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    if path == "/v1/responses":
        return _of_response(events, answer)
    ids: list[int] = []
    scores: list[Any] = []
    choices = (
        [choice for event in events for choice in event["choices"]]
        if is_stream
        else answer.json()["choices"]
    )
    for choice in choices:
        mine = choice.get("token_ids") or []
        logprobs = choice["logprobs"] or {"content": []}
        new = (
            logprobs["token_logprobs"]
            if "tokens" in logprobs
            else [each["logprob"] for each in logprobs["content"]]
        )
        assert len(mine) == len(new), "they line up in every chunk"
        ids += mine
        scores += new
    usage = events[-1]["usage"] if is_stream else answer.json()["usage"]
    return ids, scores, usage["completion_tokens"]


def _of_response(
    events: list[dict[str, Any]], answer: httpx.Response
) -> tuple[list[int], list[Any], int]:
    body = events[-1]["response"] if events else answer.json()
    scores = [each["logprob"] for each in body["output"][0]["content"][0]["logprobs"]]
    if events:
        streamed = [
            each
            for event in events
            if event["type"].endswith("text.delta")
            for each in event["logprobs"]
        ]
        assert [each["logprob"] for each in streamed] == scores
    return [], scores, body["usage"]["output_tokens"]


@pytest.mark.slow_combinations
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("path", PATHS)
def test_every_token_has_one_entry(http: httpx.Client, llm: LLM, path: str, end: str) -> None:
    whole = answer_of(http, path, end, is_stream=False)
    assert whole == answer_of(http, path, end, is_stream=True)
    ids, scores, num_tokens = whole
    assert len(scores) == num_tokens
    offline: Any = {"max_tokens": 12, "temperature": 0, "logprobs": 1, **ENDS[end]}
    prompt = (
        {"messages": [{"role": "user", "content": PROMPT}]}
        if path != "/v1/completions"
        else {"prompt": PROMPT}
    )
    prompt_ids = http.post("/tokenize", json=prompt).json()["tokens"]
    wanted = llm.generate({"prompt_token_ids": prompt_ids}, SamplingParams(**offline))[0].outputs[0]
    assert (
        wanted.logprobs is not None and len(wanted.logprobs) == len(wanted.token_ids) == num_tokens
    )
    assert not ids or ids == wanted.token_ids
    offline_scores = [
        record[token].logprob
        for token, record in zip(wanted.token_ids, wanted.logprobs, strict=True)
    ]
    assert scores == offline_scores
    assert wanted.finish_reason == ("length" if end == "the limit" else "stop")
