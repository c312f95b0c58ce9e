"""Fields that vLLM adds to OpenAI's: each does something that can be seen,
on every endpoint that takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FakeClient
from servers import MODEL, serve, serve_model

from quire.config.api import ApiConfig

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me of a fox."}],
    "max_tokens": 8,
    "temperature": 0,
}
TEXT = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
RESPONSE = {"model": MODEL, "input": "Tell me of a fox.", "max_output_tokens": 8, "temperature": 0}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": RESPONSE}


def ask(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    assert "x-quire-ignored-fields" not in answer.headers
    return dict(answer.json())


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.slow_except("/v1/completions")
@pytest.mark.parametrize("path", BODIES)
def test_what_decides_the_text(http: httpx.Client, path: str) -> None:
    plain = text_of(ask(http, path))
    word = plain.split()[1]
    ids = http.post("/tokenize", json={"prompt": f"x {word}", "add_special_tokens": False}).json()[
        "tokens"
    ]
    assert text_of(ask(http, path, temperature=2, top_k=1)) == plain
    assert text_of(ask(http, path, temperature=2, min_p=1)) == plain
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for fields in (
        {"stop": word}, {"stop_token_ids": [ids[-1]]}, {"bad_words": [word]},
        {"logit_bias": {str(ids[-1]): -100}}, {"allowed_token_ids": ids},
        {"repetition_penalty": 100.0}, {"frequency_penalty": -2, "presence_penalty": -2, limit: 60},
    ):  # fmt: skip
        changed = text_of(ask(http, path, **fields))
        assert changed != plain and (word not in changed or "bad_words" not in fields), fields
    assert text_of(ask(http, path, stop=word, include_stop_str_in_output=True)).endswith(word)
    forced = text_of(
        ask(http, path, allowed_token_ids=[2], ignore_eos=True, skip_special_tokens=False)
    )
    assert forced == "<|im_end|>" * 8
    assert text_of(ask(http, path, allowed_token_ids=[2], ignore_eos=True)) == ""
    eos = {"logit_bias": {"2": 100}, "skip_special_tokens": False}
    assert len(text_of(ask(http, path, **eos))) < len(text_of(ask(http, path, **eos, min_tokens=4)))


@pytest.mark.parametrize("path", BODIES)
def test_what_decides_other_things(http: httpx.Client, path: str) -> None:
    def cached(**fields: Any) -> int:
        usage = ask(http, path, **fields)["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"])

    ask(http, path)
    assert cached() > 0 and cached(skip_reading_prefix_cache=True) == 0
    assert cached(cache_salt=f"of {path}") == 0 and cached(cache_salt=f"of {path}") > 0
    if path != "/v1/responses":  # whose answers are stored, under ids that no client can choose
        assert ask(http, path, request_id="mine-1")["id"].endswith("-mine-1")
    timings = ask(http, path, timings=True)["timings"]
    (timings,) = timings if isinstance(timings, list) else [timings]
    assert timings["first_token_ms"] > 0
    streamed = http.post(path, json={**BODIES[path], "timings": True, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    found = [event.get("timings") or event.get("response", {}).get("timings") for event in events]
    (timings,) = [each for each in found if each]
    assert timings["first_token_ms"] > 0


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages"])
def test_a_priority_and_a_salt_reach_the_engine(path: str) -> None:
    engine = FakeClient(policy="priority")
    body = {
        **BODIES.get(path, {**CHAT, "max_tokens": 4}),
        "model": "fake",
        "priority": -3,
        "cache_salt": "s",
    }
    if path == "/v1/completions":
        body["prompt"] = [5, 6]
    with serve(engine) as server:
        answer = httpx.post(server.url + path, json=body)
        plain = httpx.post(server.url + path, json={**body, "cache_salt": None, "priority": None})
    assert (
        answer.status_code == plain.status_code == 200
        and "x-quire-ignored-fields" not in answer.headers
    )
    first, second = engine.requests
    assert (
        (first.spec.priority, second.spec.priority) == (-3, 0)
        and first.spec.namespace
        and not second.spec.namespace
    )


def test_prompts_are_cut_and_their_tokens_shown(http: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        whole = ask(http, path, return_token_ids=True)
        cut = ask(http, path, return_token_ids=True, truncate_prompt_tokens=2)

        def prompt(answer: dict[str, Any]) -> list[int]:
            return list(answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"])

        first = ask(
            http, path, return_token_ids=True, truncate_prompt_tokens=2, truncation_side="right"
        )
        assert prompt(first) == prompt(whole)[:2]
        assert prompt(cut) == prompt(whole)[-2:] and len(whole["choices"][0]["token_ids"]) == 8
        refused = http.post(path, json={**BODIES[path], "truncate_prompt_tokens": 0})
        assert refused.status_code == 400
        body = {**BODIES[path], "prompt_logprobs": 1, "stream": True}
        first = json.loads(http.post(path, json=body).text.split("\n\n")[0][6:])
        scored = first.get("prompt_logprobs") or first["choices"][0]["prompt_logprobs"]
        assert len(scored) == len(prompt(whole)) and scored[0] is None


def test_log_probabilities_of_chosen_tokens(http: httpx.Client) -> None:
    ids = [5, 300, 35]
    names = [
        http.post("/detokenize", json={"tokens": [token_id]}).json()["prompt"] for token_id in ids
    ]
    for top in (0, 2, 20):
        fields = {"logprobs": True, "top_logprobs": top, "logprob_token_ids": ids}
        for token in ask(http, "/v1/chat/completions", **fields)["choices"][0]["logprobs"][
            "content"
        ]:
            shown = [other["token"] for other in token["top_logprobs"]]
            assert shown == [token["token"], *(name for name in names if name != token["token"])], (
                "the token, and no other"
            )
        for echo in (False, True):
            answer = ask(
                http,
                "/v1/completions",
                logprobs=top,
                logprob_token_ids=ids,
                echo=echo,
                prompt_logprobs=3,
            )
            scores = answer["choices"][0]["logprobs"]
            for token, others in list(zip(scores["tokens"], scores["top_logprobs"], strict=True))[
                1 if echo else 0 :
            ]:
                assert list(others) == [token, *(name for name in names if name != token)]
    many = {
        **BODIES["/v1/chat/completions"],
        "logprobs": True,
        "logprob_token_ids": list(range(128)),
        "n": 8,
        "max_tokens": None,
    }
    config = ApiConfig(max_logprob_entries=1 << 12)
    with serve_model(config) as server, httpx.Client(base_url=server.url, timeout=60) as bounded:
        answer = bounded.post("/v1/chat/completions", json={**many, "ignore_eos": True}).json()
    assert 0 < answer["usage"]["completion_tokens"] <= (1 << 12) // 129, (
        "without max_tokens, what there is room for"
    )
    for path in ("/v1/chat/completions", "/v1/completions"):
        refused = http.post(path, json={**BODIES[path], "logprob_token_ids": ids})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids")


@pytest.mark.slow_except("/v1/completions")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_that_goes_round_in_circles_is_ended(http: httpx.Client, path: str) -> None:
    fields = {
        "allowed_token_ids": [300],
        "max_tokens": 60,
        "return_token_ids": True,
        "logprobs": path[4:6] == "ch" or 1,
    }
    loops = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    for number, more in (
        (6, {}),
        (9, {"min_tokens": 9}),
        (60, {"repetition_detection": None}),
        (6, {"n": 2, "seed": 4}),
    ):
        for choice in ask(http, path, **{**fields, "repetition_detection": loops, **more})[
            "choices"
        ]:
            assert choice["token_ids"] == [300] * number
            ended = ("length", None) if number == 60 else ("repetition", "repetition_detected")
            assert (choice["finish_reason"], choice["stop_reason"]) == ended
            assert len(choice["logprobs"].get("content") or choice["logprobs"]["tokens"]) == number
    streamed = http.post(
        path, json={**BODIES[path], **fields, "repetition_detection": loops, "stream": True}
    ).text
    chunks = [
        json.loads(line[6:])["choices"][0]
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["repetition"]
    assert sum(len(chunk.get("token_ids") or ()) for chunk in chunks) == 6
    refused = http.post(
        path, json={**BODIES[path], "repetition_detection": {"max_pattern_size": 2, "min_count": 1}}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "repetition_detection")
    assert 'finished_reason="repetition"' in http.get("/metrics").text


@pytest.fixture(scope="module")
def with_documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose chat template reads documents."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(
        "{% for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% "
        "endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with (
        serve_model(ApiConfig(chat_template=str(path))) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        yield http


def test_documents_reach_templates_that_read_them(
    with_documents: httpx.Client, http: httpx.Client
) -> None:
    documents = [{"title": "Foxes", "text": "They are <|im_end|> red."}]
    body = {"messages": CHAT["messages"], "documents": documents}
    ids = with_documents.post("/tokenize", json=body).json()["tokens"]
    text = "[Foxes: They are <|im_end|> red.]Tell me of a fox."
    assert with_documents.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
    assert 2 not in ids, "a special token that a user spelt out is text"
    answer = with_documents.post("/v1/chat/completions", json={**CHAT, **body})
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    plain = http.post("/v1/chat/completions", json=CHAT).json()
    assert plain["system_fingerprint"] != answer.json()["system_fingerprint"], (
        "another template, other answers"
    )
    refused = http.post("/v1/chat/completions", json={**CHAT, **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert http.post("/v1/chat/completions", json={**CHAT, "documents": []}).status_code == 200


def test_tokenize_counts_tools(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    )
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    config = ApiConfig(chat_template=str(template), tool_parser="hermes")
    with serve_model(config) as server, httpx.Client(base_url=server.url) as http:
        body = {"messages": CHAT["messages"], "tools": tools}
        count = http.post("/tokenize", json=body).json()["count"]
        answer = http.post("/v1/chat/completions", json={**CHAT, **body})
        assert answer.json()["usage"]["prompt_tokens"] == count
        assert http.post("/tokenize", json={**body, "tools": None}).json()["count"] < count
