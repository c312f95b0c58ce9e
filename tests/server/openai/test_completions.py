"""OpenAI behaviours 81 to 89: legacy completions and embeddings."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from servers import MODEL


def ask(client: openai.OpenAI, prompt: Any = "Once upon", **fields: Any) -> Completion:
    """One answer of a few tokens."""
    answer = client.completions.create(
        model=MODEL, prompt=prompt, **{"max_tokens": 4, "seed": 7, **fields}
    )
    assert isinstance(answer, Completion)
    return answer


def refused(
    client: openai.OpenAI, prompt: Any = "Once upon", **fields: Any
) -> openai.BadRequestError:
    """The error of a request that must be refused."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, prompt, extra_body=fields)
    return caught.value


def ids_of(http: httpx.Client, text: str) -> list[int]:
    """A text's token ids."""
    tokens: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def test_81_all_forms_of_prompts(client: openai.OpenAI, http: httpx.Client) -> None:
    texts = ["Once upon", "The dog"]
    alone = [ask(client, text, n=2) for text in texts]
    wanted = [choice.text for answer in alone for choice in answer.choices]
    ids = [ids_of(http, text) for text in texts]
    assert [choice.text for choice in ask(client, ids[0], n=2).choices] == wanted[:2]
    for prompt in (texts, ids):
        answer = ask(client, prompt, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == wanted
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    "prompt", [[1, "a"], [[1, 2], [1.5]], [True], [[5000]], [-1], [[]], {"a": 1}, 5]
)
def test_81_what_is_no_prompt(client: openai.OpenAI, prompt: Any) -> None:
    assert (refused(client, prompt).param or "").startswith("prompt")


def test_82_the_default_is_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Once upon", extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_82_83_no_tokens_but_the_prompts_logprobs(client: openai.OpenAI) -> None:
    answer = ask(client, "Once upon a time", max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == "Once upon a time" and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None and all(
        value is not None for value in choice.logprobs.token_logprobs[1:]
    )
    assert refused(client, max_tokens=0).param == "max_tokens"


@pytest.mark.parametrize("echo", [False, True])
def test_83_84_logprobs_are_four_lists_with_offsets_into_the_text(
    client: openai.OpenAI, echo: bool
) -> None:
    (choice,) = ask(client, "Once upon", echo=echo, logprobs=2, temperature=1.2).choices
    assert choice.text.startswith("Once upon") is echo
    logprobs = choice.logprobs
    assert (
        logprobs is not None
        and logprobs.tokens
        and logprobs.text_offset is not None
        and logprobs.top_logprobs is not None
    )
    assert logprobs.token_logprobs is not None
    lengths = {
        len(each)
        for each in (
            logprobs.tokens,
            logprobs.token_logprobs,
            logprobs.top_logprobs,
            logprobs.text_offset,
        )
    }
    assert lengths == {6 if echo else 4}
    shift = 0 if echo else -logprobs.text_offset[0]
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset + shift :].startswith(token)
    assert "".join(logprobs.tokens) == choice.text
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1 if echo else 0 :])


def test_84_zero_and_the_limit(client: openai.OpenAI) -> None:
    logprobs = ask(client, logprobs=0).choices[0].logprobs
    assert (
        logprobs is not None
        and logprobs.tokens
        and logprobs.token_logprobs
        and logprobs.top_logprobs is not None
    )
    alone = [
        {name: value} for name, value in zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    ]
    assert logprobs.top_logprobs == alone, "the chosen tokens themselves"
    assert refused(client, logprobs=21).param == "logprobs"


def test_85_best_of(client: openai.OpenAI) -> None:
    answer = ask(client, n=1, best_of=4, temperature=1.5)
    assert len(answer.choices) == 1
    for fields in ({"n": 3, "best_of": 2}, {"best_of": 21}, {"best_of": 2, "stream": True}):
        assert refused(client, **fields).param == "best_of"


def test_86_a_suffix_is_refused(client: openai.OpenAI) -> None:
    assert refused(client, suffix=" the end").param == "suffix"
    assert ask(client, suffix="").choices


def test_87_finish_reasons(client: openai.OpenAI, http: httpx.Client) -> None:
    raw = http.post("/v1/completions", json={"prompt": "Once upon", "max_tokens": 1}).json()[
        "choices"
    ][0]
    assert raw["finish_reason"] == "length" and raw["logprobs"] is None
    text = ask(client, max_tokens=8).choices[0].text
    stopped = ask(client, max_tokens=8, stop=text[5:8]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == text[: text.index(text[5:8])]


def test_88_a_prompt_that_ends_within_a_character_is_not_repeated(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    ids = ids_of(http, "A cat \U0001f408")
    whole = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert whole == "A cat \U0001f408"
    for cut in (1, 2, 3):
        stream = client.completions.create(
            model=MODEL, prompt=ids[:-cut], max_tokens=5, seed=1, stream=True
        )
        streamed = "".join(chunk.choices[0].text for chunk in stream)
        assert streamed == ask(client, ids[:-cut], max_tokens=5, seed=1).choices[0].text
        assert "A cat" not in streamed


def test_a_model_that_generates_refuses_embeddings_with_the_reason(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input="a cat")
    assert (caught.value.code, caught.value.param) == ("model_not_supported", "model")


@pytest.mark.parametrize(
    "fields", [{}, {"echo": True}, {"n": 2, "logprobs": 1}, {"echo": True, "logprobs": 1}]
)
def test_streams_add_up_to_the_whole(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"prompt": ["Once upon", "The dog"], "max_tokens": 4, "seed": 3, **fields}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = http.post("/v1/completions", json={**body, **options}).text
    *blocks, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    *chunks, usage = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4 * len(whole)
    for choice in whole:
        parts = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "text_offset") if choice["logprobs"] else ():
            assert [value for part in parts for value in part["logprobs"][name]] == choice[
                "logprobs"
            ][name]


def test_vllm_fields(client: openai.OpenAI) -> None:
    body = {
        "return_token_ids": True,
        "prompt_logprobs": 0,
        "truncate_prompt_tokens": 2,
        "timings": True,
    }
    answer = ask(client, "There once upon", extra_body=body).model_dump()
    (choice,) = answer["choices"]
    assert (
        len(choice["prompt_token_ids"]) == len(choice["prompt_logprobs"]) == 2
        and len(choice["token_ids"]) == 4
    )
    assert answer["timings"][0]["total_ms"] > 0
