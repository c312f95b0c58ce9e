"""T34 and T12 for reasoning: thoughts are told apart alike however the text is cut,
nothing is lost, and in linear time."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.reasoning import (
    MISTRAL_THINK,
    THINK,
    ReasoningParser,
    ReasoningText,
    is_thinking,
    reasoning_of_template,
)
from quire.text.tools import Text

ANSWERS = [
    "<think>\nTwo and two,\n\nhm </thin <think>.\n</think>\n\nFour.</think>",
    "\n <think></think>None.",
    "Plain <think>text</think>",
    "<think>cut\n\n",
    "<think>\n\n</think>\n\n",
    "no mark\n</think>\nthen",
    "<thin",
    "\n\n",
    "",
]


def read(pieces: list[str], *, is_inside: bool = False) -> list[ReasoningText | Text]:
    """Everything, with what belongs together joined."""
    parser = ReasoningParser(THINK, is_inside=is_inside)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
    return [kind("".join(each.text for each in group)) for kind, group in groupby(events, type)]


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
def test_t34_every_cut_gives_the_same(answer: str, is_inside: bool) -> None:
    whole = read([answer], is_inside=is_inside)
    assert read(list(answer), is_inside=is_inside) == whole
    for first in range(len(answer) + 1):
        for second in range(first, len(answer) + 1):
            pieces = [answer[:first], answer[first:second], answer[second:]]
            assert read(pieces, is_inside=is_inside) == whole


@settings(deadline=None, max_examples=150)
@given(data=st.data(), is_inside=st.booleans())
def test_t34_random_text_and_random_cuts(data: st.DataObject, is_inside: bool) -> None:
    words = st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", "\n", "\n" * 70, " ", "x"]),
        max_size=20,
    )
    answer = "".join(data.draw(words))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [
        answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)
    ]
    whole = read([answer], is_inside=is_inside)
    assert read(pieces, is_inside=is_inside) == whole
    assert sum(isinstance(each, ReasoningText) for each in whole) <= 1
    if not is_inside and not answer.lstrip(" \n").startswith("<think>"):
        assert whole == ([Text(answer)] if answer else [])
    marks = answer.replace("<think>", "", 1).replace("</think>", "", 1)
    if is_inside:  # but for the second mark and the line breaks at them, everything is there
        assert "".join(each.text for each in whole).replace("\n", "") == answer.replace(
            "</think>", "", 1
        ).replace("\n", "")
    elif any(isinstance(each, ReasoningText) for each in whole):
        assert (
            "".join(each.text for each in whole).replace("\n", "").strip()
            == marks.replace("\n", "").strip()
        )


def test_what_is_read() -> None:
    assert read([ANSWERS[0]]) == [
        ReasoningText("Two and two,\n\nhm </thin <think>."),
        Text("Four.</think>"),
    ]
    assert read([ANSWERS[1]]) == [Text("None.")]
    assert read([ANSWERS[2]]) == [Text(ANSWERS[2])]
    assert read([ANSWERS[5]]) == [Text(ANSWERS[5])]
    assert read([ANSWERS[5]], is_inside=True) == [ReasoningText("no mark"), Text("then")]
    assert read([ANSWERS[3]]) == [ReasoningText("cut\n\n")]


def test_thoughts_stream_as_they_come() -> None:
    parser = ReasoningParser(THINK)
    assert parser.feed("<think>\nOne") == [ReasoningText("One")]
    assert parser.feed(" two</") == [ReasoningText(" two")]
    assert parser.feed("b>") == [ReasoningText("</b>")]
    assert parser.feed("\n") == []
    assert parser.feed("</think>") == []
    assert parser.feed("\nYes") == [Text("Yes")] and parser.has_begun


@pytest.mark.parametrize("unit", ["\n", "<think>", "</think", "a", "\n</thin", " "])
def test_t12_reading_takes_linear_time(unit: str) -> None:
    def seconds(count: int) -> float:
        started = time.thread_time()
        read(list(unit * count), is_inside=True)
        return time.thread_time() - started

    seconds(100)
    small, large = (min(seconds(count) for _ in range(2)) for count in (1000, 4000))
    assert large < 8 * small + 0.05


def test_where_an_answer_begins() -> None:
    assert is_thinking(THINK, "<|im_start|>assistant\n<think>\n")
    assert not is_thinking(THINK, "<think>\n\n</think>\n\n")
    assert is_thinking(MISTRAL_THINK, "", "[THINK]So") and not is_thinking(
        MISTRAL_THINK, "[THINK]", "[THINK]So[/THINK] it"
    )


def test_the_marks_are_read_off_the_template(shared: Path) -> None:
    folder = shared / "data/tokenizers/llama_cpp_chat_templates"
    known = {
        "Qwen-Qwen3-0.6B": THINK, "Qwen-QwQ-32B": THINK,
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": THINK,
        "HuggingFaceTB-SmolLM3-3B": THINK,
        "mistralai-Ministral-3-14B-Reasoning-2512": MISTRAL_THINK,
        "Qwen-Qwen2.5-7B-Instruct": None, "meta-llama-Llama-3.1-8B-Instruct": None,
        "google-gemma-2-2b-it": None,
    }  # fmt: skip
    assert {
        name: reasoning_of_template((folder / f"{name}.jinja").read_text()) for name in known
    } == known
