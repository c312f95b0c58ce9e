"""OpenAI behaviours 54 to 60 and 74: tools, through the official client,
on a model that was never taught any."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from fake_client import FakeClient, Script
from servers import MODEL, serve

ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}


def tool(name: str, parameters: Any = None, **changes: Any) -> Any:
    function = {
        "name": name,
        **({} if parameters is None else {"parameters": parameters}),
        **changes,
    }
    return {"type": "function", "function": function}


TOOLS = [
    tool("weather", WEATHER, strict=True, description="Weather of a city"),
    tool("stop", {"properties": {}, "additionalProperties": False}),
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"max_tokens": 200, "seed": 3, "temperature": 1.0, "tools": TOOLS, **fields}
    return client.chat.completions.create(model=MODEL, messages=ASK, **fields)


def check_call(call: Any) -> None:
    assert call.type == "function" and call.id and call.function.name in ("weather", "stop")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        jsonschema.validate(arguments, WEATHER)


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("is_parallel", [True, False])
def test_56_57_58_59_required_tools_are_called(client: openai.OpenAI, is_parallel: bool) -> None:
    answer = ask(
        client, tool_choice="required", parallel_tool_calls=is_parallel, n=4, max_tokens=400
    )
    ids = []
    for choice in answer.choices:
        calls = choice.message.tool_calls
        assert calls and choice.message.content is None
        assert choice.finish_reason == "tool_calls" or (
            is_parallel and choice.finish_reason == "length"
        )
        assert is_parallel or len(calls) == 1
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            check_call(call)
        ids += [call.id for call in calls]
    assert len(set(ids)) == len(ids)


def test_33_55_a_function_by_name(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and choice.finish_reason == "stop"
    check_call(call)


def test_55_allowed_tools(client: openai.OpenAI) -> None:
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [tool("stop")]},
    }
    (choice,) = ask(client, tool_choice=allowed, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["stop"]


def test_56_60_none_and_auto(client: openai.OpenAI) -> None:
    plain = (
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12, seed=3)
        .choices[0]
        .message
    )
    for choice in ("none", None):
        fields = {} if choice is None else {"tool_choice": choice, "tools": TOOLS}
        message = (
            ask(
                client,
                **{"max_tokens": 12, "tools": openai.omit, "temperature": openai.omit, **fields},
            )
            .choices[0]
            .message
        )
        assert message.tool_calls is None and message.content == plain.content
    message = ask(client, max_tokens=12).choices[0].message
    assert message.tool_calls or message.content
    loose = [tool("f", {"type": "object", "not": {}})]
    message = ask(client, tools=loose, max_tokens=12, temperature=openai.omit).choices[0].message
    assert message.tool_calls is None and message.content  # cut short, so that it is text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("bad name")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [tool("f")] * 129}, "tools"),
        ({"tools": [tool("f", {"not": {}}, strict=True)]}, "tools[0].function.parameters"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": []},
                }
            },
            "tool_choice",
        ),
    ],
)
def test_54_what_cannot_be_honoured_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert caught.value.param == param


@pytest.mark.slow
def test_74_deltas_of_calls(client: openai.OpenAI, http: httpx.Client) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, **fields).choices[0]
    (expected,) = whole.message.tool_calls
    name, arguments, reasons = "", "", []
    for chunk in ask(client, **fields, stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.content
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or ():
            assert (
                call.index == 0
                and (call.id is None) == bool(name)
                and (call.function.name is None) == bool(name)
            )
            name += call.function.name or ""
            arguments += call.function.arguments
    assert (name, arguments) == (
        expected.function.name,
        expected.function.arguments,
    ) and reasons == ["tool_calls"]
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, seed=3, max_tokens=200, temperature=1, tools=TOOLS, **fields
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds and final.tool_calls
    assert final.tool_calls[0].function.arguments == expected.function.arguments


def test_calls_that_a_model_makes_by_itself() -> None:
    """As models that were taught to write them; text before and after stays text."""
    pieces = [
        "Let me see.<tool",
        '_call>\n{"name": "weather", "argu',
        'ments": {"city": "Os',
        'lo"}}\n</tool_call>',
        " Done.",
    ]
    with (
        serve(FakeClient(Script(pieces=pieces))) as server,
        openai.OpenAI(base_url=server.v1, api_key="x") as client,
    ):
        fields: dict[str, Any] = {"model": "fake", "messages": ASK, "tools": [tool("weather")]}
        whole = client.chat.completions.create(**fields).choices[0]
        assert whole.message.content == "Let me see. Done." and whole.finish_reason == "tool_calls"
        assert (
            whole.message.tool_calls
            and whole.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
        )
        chunks = [
            chunk.choices[0].delta
            for chunk in client.chat.completions.create(**fields, stream=True)
        ]
        assert "".join(delta.content or "" for delta in chunks) == "Let me see. Done."
        calls = [call for delta in chunks for call in delta.tool_calls or ()]
        assert (
            "".join(call.function.arguments or "" for call in calls if call.function)
            == '{"city": "Oslo"}'
        )
        untouched = client.chat.completions.create(model="fake", messages=ASK).choices[0].message
        assert untouched.content == "".join(pieces) and untouched.tool_calls is None


def test_a_conversation_goes_on_behind_a_call(client: openai.OpenAI) -> None:
    call = ask(client, tool_choice=NAMED).choices[0].message.tool_calls[0]
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Sun"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=4
    )
    assert answer.choices[0].message.content


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "day": {"$ref": "#/$defs/day"}},
    "$defs": {},
}
CITY["$defs"] = {
    "day": {
        "type": "object",
        "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 9}},
    }
}


@pytest.mark.slow_except("None")
@pytest.mark.parametrize("strict", [True, None])
def test_arguments_are_those_that_are_declared(client: openai.OpenAI, strict: bool | None) -> None:
    """And with `strict` all of them, at any depth, though the schema says nothing of the kind."""
    answer = ask(
        client, tools=[tool("weather", CITY, strict=strict)], tool_choice=NAMED, n=4, max_tokens=300
    )
    for choice in answer.choices:
        arguments = json.loads(choice.message.tool_calls[0].function.arguments)
        assert set(arguments) <= {"city", "day"} and set(arguments.get("day", {})) <= {"number"}
        assert not strict or (
            set(arguments) == {"city", "day"} and set(arguments["day"]) == {"number"}
        )


def test_a_response_format_is_closed_where_it_is_strict(client: openai.OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": CITY, "strict": True},
    }
    answer = ask(client, tools=openai.omit, response_format=form, n=4, max_tokens=300)
    for choice in answer.choices:
        assert set(json.loads(choice.message.content)) == {"city", "day"}


@pytest.mark.slow_except("required")
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
def test_calls_and_a_form_for_text_go_together(client: openai.OpenAI, choice: Any) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "word", "schema": {"enum": ["yes", "no"]}},
    }
    answer = ask(
        client,
        tool_choice=choice,
        response_format=form,
        n=4,
        max_tokens=400,
        parallel_tool_calls=False,
    )
    for each in answer.choices:
        if choice == "auto" and not each.message.tool_calls:
            assert json.loads(each.message.content) in ("yes", "no")
        else:
            check_call(each.message.tool_calls[0])
    name = {"type": "function", "name": "weather"}
    flat = [{"type": "function", **each["function"]} for each in TOOLS]
    create: Any = client.responses.create
    response = create(
        model=MODEL,
        input="How is the weather?",
        max_output_tokens=400,
        tools=flat,
        tool_choice=name if choice == NAMED else choice,
        text={"format": {"type": "json_schema", "name": "word", "schema": {"enum": ["yes", "no"]}}},
    )
    assert response.output[0].type == "function_call" or choice == "auto"


def test_arguments_that_are_no_object_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="type must be object"):
        ask(client, tools=[tool("weather", {"type": "array"}, strict=True)])
