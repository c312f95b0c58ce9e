"""Fields of a chat in random company: what each promises holds beside the others, and a stream says
what the answer says.

QUIRE_TEST_EXAMPLES asks for more than the suite's few.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from servers import MODEL, serve_model

from quire.config.api import ApiConfig

NUM_EXAMPLES = int(os.environ.get("QUIRE_TEST_EXAMPLES", "20"))
TEMPLATE = (
    "{% for each in messages %}{{ each.content }} {% if each.role == 'user' %}And then: {% "
    "endif %}{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is not false %}<think>{% endif %}{# "
    "</think> #}"
)
END = "</think>"
USER = {"role": "user", "content": "Once upon a <think>time"}
NAME = {"type": "string", "maxLength": 8}
PERSON = {
    "name": "p",
    "schema": {"type": "object", "properties": {"name": NAME}, "required": ["name"]},
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 40),
    "n": st.integers(1, 3),
    "seed": st.integers(0, 3),
    "temperature": st.sampled_from([0, 0.7, 2]),
    "top_k": st.sampled_from([0, 1, 40]),
    "repetition_penalty": st.sampled_from([0.5, 1.3]),
    "frequency_penalty": st.sampled_from([-2, 1]),
    "stop": st.sampled_from([["."], ["a", "think>"], "</thi"]),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 400), max_size=3),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 5),
    "allowed_token_ids": st.lists(st.integers(3, 4095), min_size=1, max_size=3),
    "bad_words": st.sampled_from([["the"], [END], ["</"]]),
    "logit_bias": st.sampled_from([{"2": 100}, {"2": -100}, {"30": 30}, {"17": -100}]),
    "logprobs": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "thinking_token_budget": st.sampled_from([-1, 0, 1, 3, 12]),
    "repetition_detection": st.fixed_dictionaries(
        {
            "max_pattern_size": st.integers(0, 4),
            "min_pattern_size": st.integers(0, 2),
            "min_count": st.integers(2, 4),
        }
    ),
    "include_reasoning": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "high"]),
    "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {}]),
    "response_format": st.sampled_from(
        [{"type": "json_object"}, {"type": "json_schema", "json_schema": PERSON}]
    ),
    "structured_outputs": st.sampled_from([{"regex": "[a-e]{2,9}"}, {"choice": ["yes", "no"]}]),
    "truncate_prompt_tokens": st.integers(1, 9),
    "continue_final_message": st.booleans(),
    "echo": st.booleans(),
    "tools": st.just([TOOL]),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
}
BODIES = st.lists(st.sampled_from(sorted(FIELDS)), max_size=9, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The shipped model behind a template that begins its thoughts."""
    path = tmp_path_factory.mktemp("thinker") / "template.jinja"
    path.write_text(TEMPLATE)
    config = ApiConfig(chat_template=str(path), tool_parser="hermes")
    with serve_model(config) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What is compared of an answer, by choice."""
    found: dict[int, dict[str, Any]] = {}
    for choice in answer["choices"]:
        message, logprobs = choice["message"], (choice["logprobs"] or {}).get("content") or []
        found[choice["index"]] = {
            "token_ids": choice["token_ids"],
            "content": message["content"] or "",
            "reasoning": message.get("reasoning") or "",
            "calls": "".join(
                each["function"]["name"] + each["function"]["arguments"]
                for each in message.get("tool_calls", ())
            ),
            "logprobs": [(each["token"], each["logprob"]) for each in logprobs],
            "ended": (choice["finish_reason"], choice["stop_reason"]),
        }
    return found


def streamed(text: str) -> dict[int, dict[str, Any]]:
    """The same of a stream."""
    assert text.endswith("data: [DONE]\n\n") and "error" not in text.split("data: ")[-2][:20]
    found: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            empty: dict[str, Any] = {
                "token_ids": [],
                "content": "",
                "reasoning": "",
                "calls": "",
                "logprobs": [],
                "ended": None,
            }
            mine, delta = found.setdefault(choice["index"], empty), choice["delta"]
            mine["token_ids"] += choice.get("token_ids") or []
            mine["content"] += delta.get("content") or ""
            mine["reasoning"] += delta.get("reasoning") or ""
            for each in delta.get("tool_calls") or ():
                mine["calls"] += (each["function"].get("name") or "") + each["function"][
                    "arguments"
                ]
            entries = (choice.get("logprobs") or {}).get("content") or []
            mine["logprobs"] += [(each["token"], each["logprob"]) for each in entries]
            if choice["finish_reason"] is not None:
                assert mine["ended"] is None, "a choice ends once"
                mine["ended"] = (choice["finish_reason"], choice["stop_reason"])
    return found


def repeats(token_ids: list[int], rule: dict[str, int]) -> bool:
    low, high, count = rule["min_pattern_size"] or 1, rule["max_pattern_size"], rule["min_count"]
    sizes = [size for size in range(low, high + 1) if size * count <= len(token_ids)]
    return any(token_ids[-size * count :] == token_ids[-size:] * count for size in sizes)


def check(http: httpx.Client, body: dict[str, Any], choice: dict[str, Any]) -> None:
    token_ids, (reason, stop) = choice["token_ids"], choice["ended"]
    assert reason in ("stop", "length", "repetition", "tool_calls")
    max_tokens = body["max_tokens"]
    assert len(token_ids) <= max_tokens and (reason != "length" or len(token_ids) == max_tokens)
    rule = body.get("repetition_detection")
    if rule is not None and rule["max_pattern_size"]:
        looping = [
            size
            for size in range(max(1, body.get("min_tokens", 0)), len(token_ids) + 1)
            if repeats(token_ids[:size], rule)
        ]
        assert not looping or looping == [len(token_ids)], "it ends at the first repetition"
        assert (reason == "repetition") <= bool(looping)
    assert (stop == "repetition_detected") == (reason == "repetition")
    budget = body.get("thinking_token_budget", -1)
    effort = body.get("reasoning_effort", "high")
    kwargs = {"enable_thinking": effort != "none", **body.get("chat_template_kwargs", {})}
    is_open = kwargs["enable_thinking"] and not body.get("continue_final_message")
    if budget >= 0 and is_open and "structured_outputs" not in body:
        room = (
            budget
            + len(END)
            + (3 if "response_format" in body or body.get("tool_choice") == "required" else 0)
        )
        text = http.post("/detokenize", json={"tokens": token_ids[:room] or [3]}).json()["prompt"]
        assert END in text or len(token_ids) < room, "thoughts have an end"
    if "response_format" in body and reason == "stop" and stop is None and not choice["calls"]:
        assert isinstance(json.loads(choice["content"]), dict)


@pytest.mark.slow
@settings(
    max_examples=NUM_EXAMPLES,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(fields=BODIES)
def test_fields_keep_their_promises_in_any_company(
    thinker: httpx.Client, fields: dict[str, Any]
) -> None:
    messages: list[dict[str, Any]] = [USER]
    if fields.get("continue_final_message"):
        messages.append({"role": "assistant", "content": "Well"})
        fields["add_generation_prompt"] = False
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 20,
        "seed": 1,
        "return_token_ids": True,
        **fields,
    }
    answer = thinker.post("/v1/chat/completions", json=body)
    assert answer.status_code in (200, 400), answer.text
    stream = thinker.post("/v1/chat/completions", json={**body, "stream": True})
    if answer.status_code == 400 and answer.json()["error"]["code"] == "no_token_left":
        assert stream.status_code == 400 or "no_token_left" in stream.text
        return
    assert stream.status_code == answer.status_code
    if answer.status_code == 400:
        assert answer.json() == stream.json() and answer.json()["error"]["param"] is not None
        return
    found = whole(answer.json())
    assert found == streamed(stream.text)
    for choice in found.values():
        check(thinker, body, choice)
