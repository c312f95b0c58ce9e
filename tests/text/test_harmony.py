"""Answers of gpt-oss: channels, calls, and what is neither."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from quire.text.harmony import HarmonyParser
from quire.text.reasoning import HARMONY, ReasoningText, is_thinking, reasoning_of_template
from quire.text.tools import (
    HARMONY_CALLS,
    CallArguments,
    CallBegin,
    Event,
    Text,
    format_of_template,
)

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|end|>"}'
CALLED: list[ReasoningText | Event] = [CallBegin(0, "f"), CallArguments(0, '{"a": "<|end|>"}')]
ANSWERS: dict[str, list[ReasoningText | Event]] = {
    "<|channel|>analysis<|message|>Hm <|end|>.<|end|><|start|>assistant" + FINAL + "Four.": [
        ReasoningText("Hm <|end|>."), Text("Four."),
    ],
    FINAL + "Four.": [Text("Four.")],
    FINAL + "Four.<|end|>": [Text("Four.")],
    FINAL: [],
    "<|channel|>analysis<|message|>cut": [ReasoningText("cut")],
    "<|chan": [Text("<|chan")],
    "Four.": [Text("Four.")],
    "Four. <|message|>": [Text("Four. <|message|>")],
    CALL: CALLED,
    THOUGHT + CALL + "<|call|>": [ReasoningText("Hm."), *CALLED],
    THOUGHT + THOUGHT + FINAL + "4": [ReasoningText("Hm.\nHm."), Text("4")],
    ' to=functions.f<|channel|>commentary json<|message|>{"a": "<|end|>"}': CALLED,
    '<|channel|>analysis to=functions.f code<|message|> {"a": "<|end|>"}': CALLED,
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL: [
        Text("I look."), *CALLED,
    ],
    CALL + "<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}": [
        *CALLED, CallBegin(1, "g"), CallArguments(1, "{}"),
    ],
    "<|channel|>commentary to=functions.f <|message|>{": [
        CallBegin(0, "f"), CallArguments(0, "{"),
    ],
    "<|channel|>commentary to=functions.f json<|message|>": [
        Text("<|channel|>commentary to=functions.f json<|message|>"),
    ],
    "<|channel|>commentary to=functions.f json<|message|>[1]": [
        Text("<|channel|>commentary to=functions.f json<|message|>[1]"),
    ],
    "<|channel|>commentary to=browser.search<|message|>{}<|call|><|start|>assistant" + CALL: [
        Text("<|channel|>commentary to=browser.search<|message|>{}<|call|><|start|>assistant"),
        *CALLED,
    ],
    "<|channel|>song<|message|>la": [Text("<|channel|>song<|message|>la")],
    "<|channel|>" + "a" * 300: [Text("<|channel|>" + "a" * 300)],
}  # fmt: skip


def read(answer: str, size: int, parser: HarmonyParser) -> list[ReasoningText | Event]:
    """What an answer in pieces of this size brings, successive parts of one thing joined."""
    pieces = [answer[place : place + size] for place in range(0, len(answer), size)]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
    joined: list[ReasoningText | Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "number", None))):
        some = list(group)
        first = some[0]
        text = "".join(each.text for each in some if not isinstance(each, CallBegin))
        joined.append(first if isinstance(first, CallBegin) else first._replace(text=text))
    return joined


@pytest.mark.parametrize("answer", ANSWERS)
def test_messages_are_what_their_headers_say_however_the_text_is_cut(answer: str) -> None:
    for size in (1, 2, 7, len(answer)):
        assert read(answer, size, HarmonyParser()) == ANSWERS[answer], size


def test_what_a_request_does_not_read_is_text_as_it_was_written() -> None:
    for size in (1, 5, 1000):
        text = THOUGHT + CALL
        silent = HarmonyParser(reads_calls=False)
        assert read(text, size, silent) == [ReasoningText("Hm."), Text(CALL)]
        open_minded = HarmonyParser(reads_reasoning=False)
        assert read(text, size, open_minded) == [Text(THOUGHT), *CALLED]
    inside = HarmonyParser(is_inside=True)
    assert read("Hm.<|end|><|start|>assistant" + FINAL + "4", 3, inside) == [
        ReasoningText("Hm."),
        Text("4"),
    ]


def test_a_call_is_complete_when_its_arguments_are_an_object() -> None:
    for text, num_calls in ((CALL, 1), (CALL[:-1], 0), (CALL + "}", 0), (CALL + "<|call|>", 1)):
        parser = HarmonyParser()
        read(text, 3, parser)
        assert parser.num_calls == num_calls, text


def test_text_is_given_as_soon_as_it_is_known() -> None:
    parser = HarmonyParser()
    assert parser.feed(FINAL + "Four <") == [Text("Four ")]
    assert parser.feed("b>") == [Text("<b>")]
    assert parser.feed("<|end|>") == []
    assert parser.feed(".") == [Text("<|end|>.")]


def test_templates_of_gpt_oss_are_known(shared: Path) -> None:
    folder = shared / "data/tokenizers/llama_cpp_chat_templates"
    sources = {path.name: path.read_text() for path in folder.glob("*.jinja")}
    gpt_oss = {"openai-gpt-oss-120b.jinja"}
    assert {n for n, text in sources.items() if reasoning_of_template(text) is HARMONY} == gpt_oss
    calls = {n for n, text in sources.items() if format_of_template(text) is HARMONY_CALLS}
    assert calls == gpt_oss
    assert not is_thinking(HARMONY, "<|start|>user<|message|>Hi<|end|><|start|>assistant")
