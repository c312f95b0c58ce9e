"""Prompts of requests with tools are those that transformers makes of the same messages and tools,
for every template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.errors import RequestError
from quire.server.api.anthropic.tools import read_tools as read_anthropic_tools
from quire.server.api.openai.messages import Message, for_template
from quire.server.api.openai.tools import CHAT, RESPONSES, read_tools
from quire.server.api.tools import Demand, settle_tools
from quire.text.chat import ChatTemplate
from quire.text.files import read_text_config
from quire.text.tools import HERMES

NAMED = {
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "unk_token": "<unk>",
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Größe <b>"}},
    "required": ["city"],
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "whole": {"name": "weather", "description": "The weather", "parameters": PARAMETERS},
    "another order": {
        "parameters": dict(reversed(PARAMETERS.items())),
        "description": "The weather",
        "name": "weather",
    },
    "strict": {
        "name": "weather",
        "strict": True,
        "description": "d",
        "parameters": {**PARAMETERS, "additionalProperties": False},
    },
    "unknown keys": {
        "name": "weather",
        "description": "d",
        "parameters": PARAMETERS,
        "returns": {"type": "string"},
        "x": None,
    },
    "no description": {"name": "weather", "parameters": PARAMETERS},
    "null description": {"name": "weather", "description": None, "parameters": PARAMETERS},
    "no properties": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
    "no parameters": {"name": "weather", "description": "d"},
    "a name alone": {"name": "weather"},
    "nested": {
        "name": "weather",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {
                    "anyOf": [
                        {"type": "array", "items": {"enum": [1, 2.5, None, "x"]}},
                        {"type": "null"},
                    ]
                }
            },
            "$defs": {"z": {}},
        },
    },
}
ASK = {"role": "user", "content": "Weather?"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich", "n": 1.0}'},
}
ANSWER = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"t": 3}'}
TURNED = {
    "function": {"arguments": '{"b": [1, null], "a": {}}', "name": "weather"},
    "type": "function",
    "id": "abcdefghi",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "asked": [{"role": "system", "content": "Be nice."}, ASK],
    "called": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, ANSWER],
    "called with text": [
        ASK,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        ANSWER,
    ],
    "called in another order": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [TURNED]},
        ANSWER,
    ],
    "called with more": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]},
        ANSWER,
    ],
    "called with null": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWER],
    "thought": [
        ASK,
        {"role": "assistant", "content": "Fine.", "reasoning_content": "hm"},
        {"role": "user", "content": "And?"},
    ],
    "thought before a call": [
        ASK,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "thinking": "hm",
            "tool_calls": [CALL],
        },
        ANSWER,
    ],
    "planned": [
        ASK,
        {"role": "assistant", "content": "", "tool_plan": "I look.", "tool_calls": [CALL]},
        ANSWER,
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
}


FEW = (
    "Qwen3-0.6B",
    "Hermes-3",
    "3.1-8B-Instruct",
    "Nemo",
    "GLM-4.6",
    "gpt-oss",
    "Phi-3.5",
    "R1-Distill-Qwen",
)
"""Templates that differ in what they cannot do without."""


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "all"]
)
def templates(request: pytest.FixtureRequest, every_template: dict[str, str]) -> dict[str, str]:
    if request.param:
        return every_template
    return {
        name: text for name, text in every_template.items() if any(part in name for part in FEW)
    }


@pytest.fixture(scope="module")
def every_template(shared: Path) -> dict[str, str]:
    folder = shared / "data/tokenizers"
    sources = {
        str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.jinja"))
    }
    for path in sorted(folder.glob("*/tokenizer_config.json")):
        found = read_text_config(path.parent).chat_templates
        sources |= {f"{path.parent.name}/{name}": text for name, text in found.items()}
    assert len(sources) > 100
    return sources


def _reference(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str | None:
    """What `apply_chat_template` gives; calls' arguments are objects there,
    as its documentation wants them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = json.loads(json.dumps(messages))
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    given: dict[str, Any] = {
        "tools": tools,
        "chat_template": source,
        "add_generation_prompt": True,
        **NAMED,
    }
    try:
        rendered: Any = render_jinja_template([messages], **given)
    except Exception:  # the template refuses these messages, in whatever way
        return None
    return str(rendered[0][0])


def _prompt(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str | None:
    shown = for_template([msgspec.convert(message, Message) for message in messages])
    settled = (
        asyncio.run(settle_tools(*read_tools(tools, None, None, CHAT), (HERMES, None)))
        if tools
        else None
    )
    fitting = template.needs.fit_tools(settled.shown) if settled else None
    try:
        return template.render(template.needs.fit_messages(shown), tools=fitting)
    except RequestError:
        return None


def test_every_template_shows_tools_as_in_transformers(templates: dict[str, str]) -> None:
    num_equal = num_rescued = 0
    for name, source in templates.items():
        template = ChatTemplate(source, NAMED)
        whole = _reference(source, [ASK], [{"type": "function", "function": FUNCTIONS["whole"]}])
        for kind, function in FUNCTIONS.items():
            tools = [{"type": "function", "function": function}]
            expected, prompt = _reference(source, [ASK], tools), _prompt(template, [ASK], tools)
            if expected is not None:
                assert prompt == expected, (name, kind)
                num_equal += 1
            elif whole is not None:
                num_rescued += prompt is not None
    assert num_equal > 8 * len(templates) and num_rescued > 5


def test_every_template_shows_messages_as_in_transformers(templates: dict[str, str]) -> None:
    num_equal = 0
    tools = [{"type": "function", "function": FUNCTIONS["whole"]}]
    for name, source in templates.items():
        template = ChatTemplate(source, NAMED)
        for kind, messages in CHATS.items():
            for offered in (tools, None) if kind in ("asked", "thought", "parts") else (tools,):
                expected, prompt = (
                    _reference(source, messages, offered),
                    _prompt(template, messages, offered),
                )
                # null is not written as text, and fails nowhere
                if kind == "called with null" and prompt != expected:
                    assert expected is None or "None" in expected or "null" in expected, name
                    empty = _reference(source, CHATS["called"], offered)
                    assert prompt == empty, name
                elif kind == "parts" and prompt != expected:
                    assert (
                        expected is None
                        or "'type'" in expected
                        or "Hi" not in expected
                        or '"type"' in expected
                    ), (
                        name,
                        expected,
                    )
                elif expected is not None:
                    assert prompt == expected, (name, kind)
                    num_equal += 1
    assert num_equal > 8 * len(templates)


def test_all_apis_show_a_function_alike() -> None:
    function = FUNCTIONS["whole"]
    flat = {"type": "function", **function, "strict": True}
    anthropic = {
        "name": "weather",
        "description": "The weather",
        "input_schema": PARAMETERS,
        "cache_control": {"type": "x"},
    }

    def shown(functions: Any, demand: Demand) -> str:
        settled = asyncio.run(settle_tools(functions, demand, (HERMES, None)))
        assert settled is not None
        return json.dumps(settled.shown)

    assert shown(*read_tools([flat], None, None, RESPONSES)) == json.dumps(
        [{"type": "function", "function": {**function, "strict": True}}]
    )
    assert shown(*read_anthropic_tools([anthropic], None)) == json.dumps(
        [{"type": "function", "function": function}]
    )


def test_all_tools_are_shown_where_a_grammar_sees_to_which_are_called() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    choice = {"type": "function", "function": {"name": "g"}}
    named = asyncio.run(settle_tools(*read_tools(tools, choice, None, CHAT), (HERMES, None)))
    assert named is not None and named.shown == tools
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [choice]}}
    offered = asyncio.run(settle_tools(*read_tools(tools, allowed, None, CHAT), (HERMES, None)))
    assert offered is not None and offered.shown == tools[1:]
