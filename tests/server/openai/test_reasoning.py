"""What a model thinks before it answers, told apart in chats, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_client import FakeClient, Script
from servers import MODEL, serve, serve_model

from quire.config.api import ApiConfig

ASK: list[Any] = [{"role": "user", "content": "What is two and two?"}]
PIECES = [
    "<thi",
    "nk>\nTwo",
    " and two",
    "\n</think>",
    "\n\nFour.",
    ' <tool_call>{"name": "f", "arguments": {}}</tool_call>',
]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]


@contextmanager
def talker(pieces: list[str] = PIECES, **options: Any) -> Iterator[openai.OpenAI]:
    """A client of a server whose model says these."""
    config = ApiConfig(**{"reasoning_parser": "think", **options})
    with (
        serve(FakeClient(Script(pieces=pieces)), config) as server,
        openai.OpenAI(base_url=server.v1, api_key="x") as client,
    ):
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "fake", "messages": ASK, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> dict[str, str]:
    """What the deltas of a stream add up to, by name."""
    sums: dict[str, str] = {}
    for chunk in ask(client, stream=True, **fields):
        for name, value in (
            chunk.choices[0].delta.model_dump(exclude_none=True).items() if chunk.choices else ()
        ):
            if isinstance(value, str) and name != "role":
                sums[name] = sums.get(name, "") + value
    return sums


def test_thoughts_text_and_calls_are_told_apart() -> None:
    with talker() as client:
        (choice,) = ask(client, tools=TOOLS).choices
        thoughts = {"reasoning": "Two and two", "reasoning_content": "Two and two"}
        assert (
            choice.message.content == "Four. " and choice.message.tool_calls[0].function.name == "f"
        )
        assert {name: getattr(choice.message, name) for name in thoughts} == thoughts
        assert choice.finish_reason == "tool_calls"
        assert streamed(client, tools=TOOLS) == {"content": "Four. ", **thoughts}
        hidden = ask(client, extra_body={"include_reasoning": False}).choices[0].message
        assert hidden.content == "".join(PIECES[4:]).strip("\n") and not hasattr(
            hidden, "reasoning"
        )
        assert streamed(client, extra_body={"include_reasoning": False}) == {
            "content": hidden.content
        }


def test_thoughts_may_come_before_json_but_not_before_other_forms() -> None:
    answer = '{"a": 1}'
    with talker(["<think>Hm</think>\n", '{"a"', ": 1}"]) as client:
        message: Any = ask(client, response_format={"type": "json_object"}).choices[0].message
        assert (message.content, message.reasoning) == (answer, "Hm")
        plain = ask(client, extra_body={"guided_regex": ".*"}).choices[0].message
        assert plain.content == f"<think>Hm</think>\n{answer}" and not hasattr(plain, "reasoning")


def test_thoughts_that_the_prompt_begins(tmp_path: Path) -> None:
    """As templates do that write the first mark; `auto` recognises them."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for each in messages %}{{ each.reasoning_content }}{{ "
        "each.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
    )
    pieces = ["Hm", "m\n</think>\n", "\nFour."]
    with talker(pieces, reasoning_parser="auto", chat_template=str(template)) as client:
        message = ask(client).choices[0].message
        assert (message.reasoning, message.content) == ("Hmm", "Four.")
        plain = (
            ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
            .choices[0]
            .message
        )
        assert plain.content == "".join(pieces) and not hasattr(plain, "reasoning")
        counts = [
            ask(
                client, messages=[*ASK, {"role": "assistant", "content": "4", **thoughts}, *ASK]
            ).usage.prompt_tokens
            for thoughts in (
                {},
                {"reasoning": "A long thought"},
                {"reasoning_content": "A long thought"},
            )
        ]
        assert counts[0] < counts[1] == counts[2]


def test_thoughts_that_are_cut_leave_no_content() -> None:
    with talker(["<think>", "On and on"]) as client:
        message: Any = ask(client).choices[0].message
        assert message.content is None and message.reasoning == "On and on"


@pytest.mark.parametrize("parser", ["auto", "none"])
def test_a_model_without_marks_has_no_thoughts(parser: str) -> None:
    with talker(reasoning_parser=parser) as client:
        message = ask(client).choices[0].message
        assert message.content == "".join(PIECES) and not hasattr(message, "reasoning")


TEMPLATE = (
    "{% for each in messages %}{{ each.content }} {% if each.role == 'user' %}And then: {% "
    "endif %}{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is not false %}<think>{% endif %}"
)
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 30,
    "temperature": 0,
}
END = "</think>"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The shipped model, which would think without end,
    behind a template that begins its thoughts."""
    path = tmp_path_factory.mktemp("thinker") / "template.jinja"
    path.write_text(TEMPLATE + "{# </think> #}")
    with (
        serve_model(ApiConfig(chat_template=str(path))) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http


def think(http: httpx.Client, budget: int | None, **fields: Any) -> dict[str, Any]:
    body = {**CHAT, "return_token_ids": True, "thinking_token_budget": budget, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-quire-ignored-fields" not in answer.headers
    return dict(answer.json())


def spelt(http: httpx.Client, token_ids: list[int]) -> str:
    return str(http.post("/detokenize", json={"tokens": token_ids}).json()["prompt"])


def test_thoughts_end_where_their_budget_is_spent(thinker: httpx.Client) -> None:
    long: dict[str, Any] = {"min_tokens": 30}  # what ends early has an empty answer
    (endless,) = think(thinker, None, **long)["choices"]
    assert endless["message"]["content"] is None and endless["finish_reason"] == "length"
    assert think(thinker, -1, **long)["choices"] == [endless]
    for budget in (0, 1, 7):
        (choice,) = think(thinker, budget, **long)["choices"]
        token_ids = choice["token_ids"]
        assert token_ids[:budget] == endless["token_ids"][:budget]
        thoughts, _, content = spelt(thinker, token_ids).partition(END)
        assert thoughts == spelt(thinker, token_ids[:budget]) if budget else not thoughts
        assert (choice["message"]["content"] or "") == content.lstrip("\n")
        assert (choice["message"].get("reasoning") or "") == thoughts.strip(
            "\n"
        ) and END not in content
        assert len(token_ids) == 30 and choice["finish_reason"] == "length"
    (cut,) = think(thinker, 20, max_tokens=10, min_tokens=10)["choices"]
    assert cut["token_ids"] == endless["token_ids"][:10] and cut["message"]["content"] is None


def test_a_budget_in_streams_and_for_several_answers(thinker: httpx.Client) -> None:
    more = {"n": 3, "seed": 5, "temperature": 1.0, "logprobs": True, "ignore_eos": True}
    whole = think(thinker, 4, **more)["choices"]
    body = {**CHAT, **more, "thinking_token_budget": 4, "return_token_ids": True, "stream": True}
    lines = thinker.post("/v1/chat/completions", json=body).text.splitlines()
    deltas = [
        each
        for line in lines
        if line.startswith("data: {")
        for each in json.loads(line[6:])["choices"]
    ]
    for choice in whole:
        mine = [each["delta"] for each in deltas if each["index"] == choice["index"]]
        assert (
            "".join(each.get("reasoning") or "" for each in mine) == choice["message"]["reasoning"]
        )
        assert "".join(each.get("content") or "" for each in mine) == (
            choice["message"]["content"] or ""
        )
        assert spelt(thinker, choice["token_ids"][4:]).startswith(END)
        assert len(choice["logprobs"]["content"]) == 30
    assert len({tuple(choice["token_ids"]) for choice in whole}) > 1


@pytest.mark.slow
def test_a_budget_and_a_form(thinker: httpx.Client) -> None:
    """The answer has its form, behind thoughts that have an end."""
    fields: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "max_tokens": 60,
        "temperature": 1.0,
        "seed": 1,
    }
    for budget in (0, 3, 12):
        (choice,) = think(thinker, budget, **fields)["choices"]
        thoughts, end, content = spelt(thinker, choice["token_ids"]).partition(END)
        assert (
            end
            and len(thinker.post("/tokenize", json={"prompt": thoughts}).json()["tokens"])
            <= budget + 3
        )
        assert content.lstrip("\n").startswith("{") and choice["message"]["content"].startswith("{")
    regex = think(thinker, 3, structured_outputs={"regex": "[a-d]{20}"})["choices"][0]["message"]
    assert len(regex["content"]) == 20, (
        "a form that leaves no room for thoughts leaves none to be counted"
    )


@pytest.mark.slow
def test_a_budget_where_the_model_may_or_may_not_think(thinker: httpx.Client) -> None:
    """Without the template's mark, and with one in the user's text,
    the answer is none of the budget's business."""
    plain: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    user: dict[str, Any] = {**plain, "messages": [{"role": "user", "content": "Once <think>"}]}
    for fields in (plain, user):
        assert think(thinker, 2, **fields)["choices"] == think(thinker, None, **fields)["choices"]
    body = {"model": MODEL, "max_tokens": 20, "temperature": 0, "thinking_token_budget": 3}
    raw, plain_raw = (
        thinker.post("/v1/completions", json={**body, "prompt": prompt}).json()["choices"][0][
            "text"
        ]
        for prompt in ("Once upon <think>", "Once upon")
    )
    assert END in raw and END not in plain_raw
    begun = [*CHAT["messages"], {"role": "assistant", "content": "<think>Well"}]  # type: ignore[misc]
    (choice,) = think(
        thinker, 2, messages=begun, continue_final_message=True, add_generation_prompt=False
    )["choices"]
    assert spelt(thinker, choice["token_ids"][2:]).startswith(END)


@pytest.mark.parametrize("effort", ["none", "low"])
def test_an_effort_says_whether_to_think_at_all(thinker: httpx.Client, effort: str) -> None:
    """To a template that knows no degrees of it; what it is told itself goes before."""
    is_wanted = effort != "none"
    (choice,) = think(thinker, None, reasoning_effort=effort)["choices"]
    (told,) = think(
        thinker, None, chat_template_kwargs={"enable_thinking": is_wanted}, reasoning_effort="high"
    )["choices"]
    assert choice == told and ("reasoning" in choice["message"]) == is_wanted
    body: dict[str, Any] = {
        "model": MODEL,
        "input": "Once upon a time",
        "temperature": 0,
        "max_output_tokens": 5,
    }
    answer = thinker.post("/v1/responses", json={**body, "reasoning": {"effort": effort}})
    assert [item["type"] for item in answer.json()["output"]] == [
        "reasoning" if is_wanted else "message"
    ]
    assert "x-quire-ignored-fields" not in answer.headers


def test_a_budget_on_the_other_endpoints(thinker: httpx.Client) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "input": "Once upon a time",
        "temperature": 0,
        "max_output_tokens": 30,
        "min_tokens": 30,
    }
    answer = thinker.post("/v1/responses", json={**body, "thinking_token_budget": 5}).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    asked = {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 5}}
    answer = thinker.post("/v1/messages", json=asked).json()
    said = think(thinker, 5)["choices"][0]["message"]
    assert answer["content"][0]["type"] == "thinking"
    assert answer["content"][0]["thinking"] == said["reasoning"]
    texts = [block["text"] for block in answer["content"][1:]]
    assert texts == ([said["content"]] if said["content"] else [])
    for wrong in ("5", -1, True, 1.5):
        refused = thinker.post(
            "/v1/messages", json={**CHAT, "thinking": {"type": "enabled", "budget_tokens": wrong}}
        )
        assert refused.status_code == 400 and "budget_tokens" in refused.json()["error"]["message"]
    for wrong in (-2, "5", 1 << 31):
        assert (
            thinker.post(
                "/v1/chat/completions", json={**CHAT, "thinking_token_budget": wrong}
            ).status_code
            == 400
        )


def test_a_budget_for_a_model_without_marks_is_refused(http: httpx.Client) -> None:
    text = {"model": MODEL, "prompt": "Once"}
    for path, body in (
        ("chat/completions", CHAT),
        ("completions", text),
        ("responses", {"model": MODEL, "input": "Once"}),
    ):
        refused = http.post(f"/v1/{path}", json={**body, "thinking_token_budget": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "thinking_token_budget",
        )
        assert "not told apart" in refused.json()["error"]["message"]
