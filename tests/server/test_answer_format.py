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
from quire.text.reasoning import HARMONY, MISTRAL_THINK, THINK, ReasoningText
from quire.text.tools import HARMONY_CALLS, HERMES, CallArguments, CallBegin


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


CHANNEL_NAMES = ("channel", "message", "end", "start", "constrain")
CHANNEL_IDS = {f"<|{name}|>": 256 + place for place, name in enumerate(CHANNEL_NAMES)}
CHANNEL_TOKENS = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), *(name.encode() for name in CHANNEL_IDS), b"<end>"],
    frozenset(range(256, 262)),
    (261,),
)
"""Of a model that writes each mark with several tokens, some of them special."""
CHANNELS = ReasoningTags(HARMONY, is_special=True)
THOUGHT, FINAL = "<|channel|>analysis<|message|>Hm {", "<|channel|>final<|message|>"
TURN = "<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


def check_channels(
    answer_format: AnswerFormat, form: StructuredOutputsParams | None, texts: dict[str, bool]
) -> None:
    """Check which of the texts an answer may be."""
    given = answer_format.constraints(form, "x")
    assert given["skip_special_tokens"] is False
    grammar = compile_grammar(given["structured_outputs"].wire, NativeVocabulary(CHANNEL_TOKENS))
    for text, is_good in texts.items():
        parts = re.split(r"(<\|[a-z]+\|>)", text)
        data = [
            each
            for part in parts
            for each in ([CHANNEL_IDS[part]] if part in CHANNEL_IDS else part.encode())
        ]
        matcher = grammar.deep_copy()
        is_met = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
        assert is_met == is_good, text


def test_channels_come_before_a_form() -> None:
    texts = {
        f'{FINAL}{{"a": 1}}': True,
        f'{THOUGHT}{TURN}{FINAL}{{"a": 1}}': True,
        '{"a": 1}': False,
        f"{THOUGHT}{TURN}{FINAL}text": False,
        f'{THOUGHT}{FINAL}{{"a": 1}}': False,
    }
    check_channels(AnswerFormat(CHANNELS), JSON, texts)


@pytest.mark.parametrize("mode", ["required", "named", "auto"])
@pytest.mark.parametrize("form", [None, JSON])
def test_calls_on_a_channel_have_their_form(
    mode: Mode, form: StructuredOutputsParams | None
) -> None:
    """Behind reasoning and remarks; where no call is demanded, a text may come in its place."""
    assert isinstance(JSON.json, dict)
    function = Function(name="f", parameters=JSON.json, strict=True)
    demand = Demand(mode=mode, names={"f"} if mode == "named" else None)
    settled = asyncio.run(
        settle_tools([function], demand, (HARMONY_CALLS, 256), has_form=form is not None)
    )
    remark = "<|channel|>commentary<|message|>I look."
    is_free = mode == "auto"
    texts = {
        CALLED: True,
        f"{THOUGHT}{TURN}{remark}{TURN}{CALLED}": True,
        CALLED.replace("1", '"x"'): False,
        CALLED.replace("functions.f", "functions.g"): False,
        f"{CALLED}{TURN}{CALLED}": False,
        f"{THOUGHT}{TURN}{FINAL}Four.": is_free and form is None,
        f'{FINAL}{{"a": 1}}': is_free,
        "Four.": False,
    }
    check_channels(AnswerFormat(CHANNELS, tools=settled), form, texts)


def test_channels_are_read_by_one_parser_or_two() -> None:
    """Also where the operator chose other notations for reasoning, or for calls."""
    tools_of_channels = ToolUse(
        mode="auto", shown=[], form=HARMONY_CALLS, grammar=None, shows_special=True
    )
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    hermes = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    called = [CallBegin(0, "f"), CallArguments(0, '{"a": 1}')]
    for answer_format, text in (
        (AnswerFormat(CHANNELS, tools=tools_of_channels), thought + CALLED),
        (AnswerFormat(CHANNELS, tools=tools("auto")), thought + FINAL + hermes),
        (AnswerFormat(PLAIN, tools=tools_of_channels), "<think>Hm</think>\n" + CALLED),
    ):
        reader = answer_format.reader()
        assert reader.feed(text, [], is_last=True) == [ReasoningText("Hm"), *called]
        assert reader.num_calls == 1


def test_thoughts_may_come_before_calls_that_are_demanded() -> None:
    call = b'<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer_format = AnswerFormat(PLAIN, tools=tools("required"))
    assert accepts(answer_format, list(call)) and accepts(
        answer_format, [*b"<think>Hm</think>\n", *call]
    )
    assert not accepts(answer_format, [*b"Hm", *call])
