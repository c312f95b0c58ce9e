"""The format of a request's answers: reasoning, text and tool calls are separated here for all
APIs.

Owns the joining of the two parsers, the count of reasoning tokens, and the room for reasoning
before an output schema. Where a request offers no tools, nothing is a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.grammars import Grammar
from quire.core.structure import StructuredOutputsParams, lark_literal
from quire.grammar.backend import embedded_schema
from quire.server.api.channels import with_form
from quire.server.api.tools import ToolUse
from quire.server.http.errors import bad_request
from quire.text.harmony import HarmonyParser
from quire.text.reasoning import HARMONY, ReasoningFormat, ReasoningParser, ReasoningText
from quire.text.tools import HARMONY_CALLS, CallArguments, CallBegin, Text, ToolParser

Event = ReasoningText | Text | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around a model's reasoning, and their token ids, where they are single tokens."""

    form: ReasoningFormat
    begin_token_id: int | None = None
    end_token_id: int | None = None
    is_special: bool = False
    """Whether the tags are special tokens, which must not be hidden from the parser."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How all answers to one request are parsed."""

    tags: ReasoningTags | None = None
    """None where nothing is parsed as reasoning."""
    is_inside: bool = False
    """Whether the answer begins with reasoning."""
    tools: ToolUse | None = None

    @property
    def is_text_only(self) -> bool:
        """Whether all of an answer is text."""
        return self.tags is None and self.tools is None

    @property
    def is_call(self) -> bool:
        """Whether all answers are calls, so that an output schema for text has no effect."""
        return self.tools is not None and self.tools.is_enforced

    @property
    def has_channels(self) -> bool:
        """Whether calls are messages on channels, beside those of reasoning."""
        return self.tools is not None and self.tools.form is HARMONY_CALLS

    def reader(self) -> AnswerReader:
        """Return a reader for one answer."""
        return AnswerReader(self)

    def constraints(self, form: StructuredOutputsParams | None, param: str) -> dict[str, Any]:
        """Return the sampling parameters that the answer's format, and the output schema of
        `param`, need. Raises ApiError 400."""
        given: dict[str, Any] = {"structured_outputs": form}
        grammar = None if self.tools is None else self.tools.grammar
        if grammar is not None and form is not None and not self.is_call:
            if not is_json(form):
                raise bad_request(
                    f"{param}: beside tools an answer that is text can have the form of JSON alone",
                    param=param,
                )
            text = _json_grammar(form.wire)
            either = with_form if self.has_channels else _either
            grammar = either(text, grammar.text)
        if self.has_channels and grammar is not None:
            pass  # it has room for reasoning already
        elif self.tags is not None and form is not None and not self.is_call:
            text = _json_grammar(form.wire) if grammar is None else grammar.text
            grammar = _after_reasoning(text, self.tags, self.is_inside)
        elif self.tags is not None and self.is_call and grammar is not None:
            grammar = _after_reasoning(grammar.text, self.tags, self.is_inside)
        if grammar is not None:
            given["structured_outputs"] = StructuredOutputsParams.of_grammar(grammar)
        if (self.tools is not None and self.tools.shows_special) or (
            self.tags is not None and self.tags.is_special
        ):
            given["skip_special_tokens"] = False
        return given


def is_json(form: StructuredOutputsParams) -> bool:
    """Return whether a form is JSON, before which there may be reasoning and
    beside which there may be calls."""
    return form.wire.kind in ("json", "json_compact")


def _either(form: str, calls: str) -> Grammar:
    """Return two grammars of ours, each of which ends with the rule `start`, as alternatives."""
    (one, _, first), (other, _, second) = form.rpartition("start: "), calls.rpartition("start: ")
    return Grammar("lark", f"{one}{other}answer: {first} | {second}\nstart: answer")


def _json_grammar(wire: Grammar) -> str:
    schema = embedded_schema(wire.text, is_compact=wire.kind == "json_compact")
    return f"form: %json {schema}\nstart: form"


def _after_reasoning(text: str, tags: ReasoningTags, is_inside: bool) -> Grammar:
    """Return a grammar of ours, which ends with the rule `start`, with room for reasoning before
    it, which a prompt that has begun them demands.
    """
    rules, _, start = text.rpartition("start: ")
    end = _mark(tags, tags.form.end, tags.end_token_id)
    lines = [f"thoughts[suffix={end}]: /(?s:.*)/"]
    if tags.is_special:
        lines = [f"thoughts: THOUGHT? {end}", "THOUGHT: /(?s:.+)/"]
    begin = _mark(tags, tags.form.begin, tags.begin_token_id)
    behind = f"thoughts BREAKS? {start}"
    plain = f"{_mark(tags, tags.form.plain, None)} {start}" if tags.form.plain else start
    lines += [
        "BREAKS: /\\n{1,4}/",
        f"start: {behind}" if is_inside else f"start: {plain} | {begin} {behind}",
    ]
    return Grammar("lark", rules + "\n".join(lines))


def _mark(tags: ReasoningTags, text: str, token_id: int | None) -> str:
    """Return a mark as a grammar writes it: one special token, several of them with texts between,
    or a text."""
    if not tags.is_special:
        return lark_literal(text)
    if not tags.form.has_special_parts:
        return f"<[{token_id}]>"
    parts = re.split(r"(<\|[a-z]+\|>)", text)
    return " ".join(each if each[0] == "<" else lark_literal(each) for each in parts if each)


class AnswerReader:
    """One answer, piece by piece."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        tags, tools = answer_format.tags, answer_format.tools
        is_inside = answer_format.is_inside
        self._reasoning: ReasoningParser | HarmonyParser | None = None
        self._calls: ToolParser | HarmonyParser | None = None
        if tags is not None and tags.form is not HARMONY:
            self._reasoning = ReasoningParser(tags.form, is_inside=is_inside)
        elif tags is not None and not answer_format.has_channels:
            self._reasoning = HarmonyParser(reads_calls=False, is_inside=is_inside)
        if answer_format.has_channels:
            is_all = tags is not None and tags.form is HARMONY
            self._calls = HarmonyParser(reads_reasoning=is_all, is_inside=is_all and is_inside)
        elif tools is not None:
            self._calls = ToolParser(tools.form)
        self._end_token_id = None if tags is None else tags.end_token_id
        self._is_counting = self._end_token_id is not None
        self._num_counted = 0

    @property
    def num_calls(self) -> int:
        """Calls that are complete."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the closing think tag;
        0 for a model that writes the mark with several."""
        return self._num_counted if self._reasoning is not None and self._reasoning.has_begun else 0

    def feed(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> list[Event]:
        """Return what a piece of the answer brings."""
        if self._is_counting:
            self._count(token_ids)
        if self._reasoning is None:
            return self._read(text, is_last=is_last)
        found = self._reasoning.feed(text) + (self._reasoning.flush() if is_last else [])
        events: list[Event] = [each for each in found if isinstance(each, ReasoningText)]
        rest = "".join(each.text for each in found if isinstance(each, Text))
        return events + self._read(rest, is_last=is_last)

    def _read(self, text: str, *, is_last: bool) -> list[Event]:
        """Text and calls."""
        if self._calls is None:
            return [Text(text)] if text else []
        return [*self._calls.feed(text), *(self._calls.flush() if is_last else [])]

    def _count(self, token_ids: Sequence[int]) -> None:
        self._is_counting = self._end_token_id not in token_ids
        num_tokens = (
            len(token_ids)
            if self._is_counting
            else list(token_ids).index(self._end_token_id or 0) + 1
        )
        self._num_counted += num_tokens
