"""The count of reasoning tokens, and the constraints that an answer format puts on the sampler."""

from __future__ import annotations

import asyncio
import re

import pytest

from quire.core.structure import StructuredOutputsParams
from quire.grammar.backend import NativeVocabulary, Vocabulary, compile_grammar
from quire.server.api.answer_format import AnswerFormat, ReasoningTags
from quire.server.api.tools import Demand, Function, Mode, ToolUse, settle_tools
from quire.server.http.errors import ApiError
from quire.text.reasoning import HARMONY, MISTRAL_THINK, THINK
from quire.text.tools import HERMES


@pytest.mark.parametrize("size", [1, 2, 7])
def test_tokens_up_to_the_second_mark_are_counted(size: int) -> None:
    pieces = ["<think>", "a", "b", "</think>", "c", "</think>"]
    token_ids = [1, 5, 6, 2, 7, 2]
    reader = AnswerFormat(ReasoningTags(THINK, 1, 2)).reader()
    for start in range(0, len(pieces), size):
        end = start + size
        reader.feed("".join(pieces[start:end]), token_ids[start:end], is_last=end >= len(pieces))
    assert reader.num_reasoning_tokens == 4
    silent = AnswerFormat(ReasoningTags(THINK, 1, 2)).reader()
    silent.feed("a", [5], is_last=True)
    assert silent.num_reasoning_tokens == 0
    cut = AnswerFormat(ReasoningTags(THINK, 1, 2), is_inside=True).reader()
    cut.feed("ab", [5, 6], is_last=True)
    assert cut.num_reasoning_tokens == 2


def tools(mode: Mode, *, has_form: bool = False) -> ToolUse:
    settled = asyncio.run(
        settle_tools([Function(name="f")], Demand(mode=mode), (HERMES, None), has_form=has_form)
    )
    assert settled is not None
    return settled


def test_special_marks_are_shown_to_the_parser() -> None:
    assert (
        AnswerFormat(ReasoningTags(MISTRAL_THINK, 3, 4, is_special=True)).constraints(None, "x")[
            "skip_special_tokens"
        ]
        is False
    )
    assert "skip_special_tokens" not in AnswerFormat(ReasoningTags(THINK, 3, 4)).constraints(
        None, "x"
    )


def test_a_form_is_for_answers_that_are_text() -> None:
    form, regex = StructuredOutputsParams(json_object=True), StructuredOutputsParams(regex="a")
    modes: list[Mode] = ["required", "named"]
    for mode in modes:
        demanded = tools(mode)
        assert (
            AnswerFormat(tools=demanded).constraints(form, "x")["structured_outputs"].wire
            == demanded.grammar
        )
        assert (
            AnswerFormat(tools=demanded).constraints(regex, "x")["structured_outputs"].wire
            == demanded.grammar
        )
    assert AnswerFormat(tools=tools("auto")).constraints(regex, "x")["structured_outputs"] is regex
    offered = tools("auto", has_form=True)
    with pytest.raises(ApiError) as caught:
        AnswerFormat(tools=offered).constraints(regex, "text.format")
    assert caught.value.param == "text.format"
    call = '<tool_call>\n{"name": "f", "arguments": {"b": 2}}\n</tool_call>'
    for marks, thoughts in ((None, ""), (ReasoningTags(THINK), "<think>so</think>\n")):
        wire = AnswerFormat(marks, tools=offered).constraints(JSON, "x")["structured_outputs"].wire
        native = compile_grammar(wire, NativeVocabulary(TOKENS))
        for text, is_good in ((call, True), ('{"a": 1}', True), ('{"b": 1}', False), ("so", False)):
            matcher, data = native.deep_copy(), list((thoughts + text).encode())
            assert (
                matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
            ) == is_good, text


TOKENS = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), b"[THINK]", b"[/THINK]", b"<end>"],
    frozenset({256, 257, 258}),
    (258,),
)
PLAIN, SPECIAL = ReasoningTags(THINK), ReasoningTags(MISTRAL_THINK, 256, 257, is_special=True)
JSON = StructuredOutputsParams(
    json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
)


def accepts(answer_format: AnswerFormat, token_ids: list[int]) -> bool:
    """Whether an answer with a form may be this."""
    form = None if answer_format.tools is not None else JSON
    matcher = compile_grammar(
        answer_format.constraints(form, "x")["structured_outputs"].wire, NativeVocabulary(TOKENS)
    ).deep_copy()
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("marks", [PLAIN, SPECIAL])
def test_thoughts_may_come_before_a_form_and_must_end_where_the_prompt_began_them(
    marks: ReasoningTags, is_inside: bool
) -> None:
    begin, end = ([256], [257]) if marks.is_special else (list(b"<think>"), list(b"</think>"))
    answer, thought = list(b'{"a": 1}'), list("Hm \u00e4, {2}\n".encode())
    answer_format = AnswerFormat(marks, is_inside)
    opening = [] if is_inside else begin
    assert accepts(answer_format, [*opening, *thought, *end, *b"\n\n", *answer])
    assert accepts(answer_format, [*opening, *end, *answer])
    assert accepts(answer_format, answer) != is_inside
    assert not accepts(answer_format, [*opening, *thought, *end])
    assert not accepts(answer_format, [*opening, *thought, *end, *b"text"])


def test_channels_come_before_a_form() -> None:
    """Of a model that writes each mark with several tokens, some of them special."""
    marks = ReasoningTags(HARMONY, is_special=True)
    names = ("channel", "message", "end", "start")
    ids = {f"<|{name}|>": 256 + place for place, name in enumerate(names)}
    tokens = Vocabulary(
        [*(bytes([byte]) for byte in range(256)), *(name.encode() for name in ids), b"<end>"],
        frozenset(range(256, 261)),
        (260,),
    )
    given = AnswerFormat(marks).constraints(JSON, "x")
    assert given["skip_special_tokens"] is False
    grammar = compile_grammar(given["structured_outputs"].wire, NativeVocabulary(tokens))

    def encoded(text: str) -> list[int]:
        parts = re.split(r"(<\|[a-z]+\|>)", text)
        return [each for part in parts for each in ([ids[part]] if part in ids else part.encode())]

    thought, final = "<|channel|>analysis<|message|>Hm {", "<|channel|>final<|message|>"
    turn = "<|end|><|start|>assistant"
    for text, is_good in (
        (f'{final}{{"a": 1}}', True),
        (f'{thought}{turn}{final}{{"a": 1}}', True),
        ('{"a": 1}', False),
        (f"{thought}{turn}{final}text", False),
        (f'{thought}{final}{{"a": 1}}', False),
    ):
        matcher, data = grammar.deep_copy(), encoded(text)
        is_met = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
        assert is_met == is_good, text


def test_thoughts_may_come_before_calls_that_are_demanded() -> None:
    call = b'<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer_format = AnswerFormat(PLAIN, tools=tools("required"))
    assert accepts(answer_format, list(call)) and accepts(
        answer_format, [*b"<think>Hm</think>\n", *call]
    )
    assert not accepts(answer_format, [*b"Hm", *call])
