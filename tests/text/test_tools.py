"""T34 and T12: calls are read alike however the text is cut, nothing of it is lost,
and in linear time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import timed

from quire.text.tools import (
    FORMATS,
    CallArguments,
    CallBegin,
    Event,
    Text,
    ToolParser,
    format_of_template,
)

ARGUMENTS = '{"city": "Zürich \\"}{\\u00e9", "days": [1, {"a": -2.5e3}], "on": null}'
ANSWERS = {
    "hermes": [
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        (
            f'<tool_call>{{"arguments": {ARGUMENTS}, "name": '
            f'"weather"}}</tool_call>\n<tool_call>\n{{"name":"b","arguments":{{}}}}</tool_call>.'
        ),
        (
            'No <tool_cal> here <tool_call>{"name": 5}</tool_call> and <<tool_call>> '
            "<tool_call>nor here"
        ),
        (
            '<tool_call>{"id": 7, "name": "a", "more": [true, "}"], "arguments": {"x": '
            '"</tool_call>"}}</tool_call> done'
        ),
        '<tool_call>\n{"name": "cut", "arguments": {"x": [1, "y',
        '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b", "arguments": {}} x',
    ],
    "mistral": [
        (
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "b", '
            f'"arguments": {{}}, "id": "abcdefghi"}}]'
        ),
        f'[TOOL_CALLS] [{{"arguments": {ARGUMENTS}, "name": "weather"}}] and text',
        "[TOOL_CALL] [[TOOL_CALLS] no",
    ],
    "llama3_json": [
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
        f' {{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "b", "parameters": {{}}}}',
        '{"a": 1, "b": [2]} is no call',
        "Text with {braces}",
        '{"name": "half", "parameters": {"x"',
    ],
}
CASES = [(name, answer) for name, answers in ANSWERS.items() for answer in answers]


def read(form: str, pieces: list[str]) -> list[Event]:
    """Everything, with what belongs together joined."""
    parser = ToolParser(FORMATS[form])
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and last.number == event.number
        ):
            joined[-1] = CallArguments(last.number, last.text + event.text)
        else:
            joined.append(event)
    return joined


def calls(events: list[Event]) -> list[tuple[str, str]]:
    names = {event.number: event.name for event in events if isinstance(event, CallBegin)}
    return [
        (
            name,
            "".join(
                event.text
                for event in events
                if isinstance(event, CallArguments) and event.number == index
            ),
        )
        for index, name in names.items()
    ]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


@pytest.mark.slow_except(
    "hermes-answer1",
    "hermes-No*",
    "hermes-*half*",
    "mistral-answer8",
    "mistral-*no*",
    "llama3_json-answer10",
    "llama3_json-*call",
    "llama3_json-Text*",
)
@pytest.mark.parametrize(("form", "answer"), CASES)
def test_t34_every_cut_gives_the_same(form: str, answer: str) -> None:
    whole = read(form, [answer])
    assert read(form, list(answer)) == whole
    for first in range(len(answer) + 1):
        assert read(form, [answer[:first], answer[first:]]) == whole
        for second in range(first, len(answer) + 1, 1 if len(answer) < 80 else 7):
            assert read(form, [answer[:first], answer[first:second], answer[second:]]) == whole


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(data=st.data(), form=st.sampled_from(sorted(FORMATS)))
def test_t34_random_text_and_random_cuts(data: st.DataObject, form: str) -> None:
    alphabet = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        '{"name": "a", "arguments": {}}',
        '"name"',
        '"parameters"',
        "<",
        "{",
    ]
    words = st.lists(st.sampled_from([*alphabet, *'}[],:"\\ \nx1;']), max_size=40)
    answer = "".join(data.draw(words))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [
        answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)
    ]
    whole = read(form, [answer])
    assert read(form, pieces) == whole
    if not calls(whole):
        assert text(whole) == answer  # nothing is lost


def test_what_is_read() -> None:
    first, second = (read("hermes", [answer]) for answer in ANSWERS["hermes"][:2])
    assert text(first) == "Let me see.\n" and calls(first) == [("weather", ARGUMENTS)]
    assert (
        calls(second) == [("weather", ARGUMENTS), ("b", "{}")] and text(second) == "."
    )  # white space between calls is none of the answer
    assert json.loads(calls(second)[0][1])["city"] == 'Zürich "}{é'
    none = ANSWERS["hermes"][2]
    assert read("hermes", [none]) == [Text(none)]
    assert calls(read("hermes", [ANSWERS["hermes"][3]])) == [("a", '{"x": "</tool_call>"}')]
    assert calls(read("hermes", [ANSWERS["hermes"][4]])) == [("cut", '{"x": [1, "y')]
    assert read("hermes", [ANSWERS["hermes"][5]]) == [Text(ANSWERS["hermes"][5])]
    assert calls(read("mistral", [ANSWERS["mistral"][0]])) == [("weather", ARGUMENTS), ("b", "{}")]
    assert calls(read("llama3_json", [ANSWERS["llama3_json"][1]])) == [
        ("weather", ARGUMENTS),
        ("b", "{}"),
    ]
    assert read("llama3_json", ['{"a": 1, "b": [2]} is no call']) == [
        Text('{"a": 1, "b": [2]} is no call')
    ]


def test_a_name_that_no_answer_can_have_is_no_call() -> None:
    """JSON spells half of a surrogate pair, and UTF-8 does not."""
    half = '<tool_call>{"name": "a\\ud83d", "arguments": {}}</tool_call>'
    whole = half.replace("\\ud83d", "\\ud83d\\ude00")
    assert read("hermes", [half]) == [Text(half)]
    assert calls(read("hermes", [whole])) == [("a\U0001f600", "{}")]


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser(FORMATS["hermes"])
    events = parser.feed('Hm <tool_call>{"name": "a", "arguments": {"x')
    assert events == [Text("Hm "), CallBegin(0, "a"), CallArguments(0, '{"x')]
    assert parser.feed('": 1') == [CallArguments(0, '": 1')]


@pytest.mark.slow_except(
    "*-harmony", "*-llama3_json", "*-mistral", "<-hermes", "<tool_call>-hermes", "{*-hermes"
)
@timed
@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize(
    "unit",
    [
        "<",
        "<tool_call>",
        "[TOOL_CALLS][{",
        '{"name":',
        '<tool_call>{"a": "',
        '<tool_call>{"name":"a","arguments":{"b":"',
    ],
)
def test_t12_reading_takes_linear_time(form: str, unit: str) -> None:
    def seconds(count: int) -> float:
        started = time.thread_time()
        read(form, [unit * count])
        return time.thread_time() - started

    seconds(100)
    small, large = (min(seconds(count) for _ in range(2)) for count in (1000, 4000))
    assert large < 8 * small + 0.05


def test_the_notation_is_read_off_the_template(shared: Path) -> None:
    folder = shared / "data/tokenizers/llama_cpp_chat_templates"
    known = {
        "Qwen-Qwen2.5-7B-Instruct": "hermes", "Qwen-Qwen3-0.6B": "hermes",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
        "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
        "mistralai-Mistral-Nemo-Instruct-2407": "mistral", "google-gemma-2-2b-it": "hermes",
        "mistralai-Ministral-3-14B-Reasoning-2512": None, "Qwen3-Coder": None,
        "deepseek-ai-DeepSeek-V3.1": None,
    }  # fmt: skip
    found = {name: format_of_template((folder / f"{name}.jinja").read_text()) for name in known}
    assert {name: form and form.name for name, form in found.items()} == known
