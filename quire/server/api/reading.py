"""How a request's answers are to be read: thoughts, text and calls told apart, whichever API then
writes them down.

Owns the joining of the two parsers, the count of tokens that were thoughts, and the room for
thoughts before an answer's form. Where a request offers no tools, nothing is a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.grammars import Grammar
from quire.core.structure import StructuredOutputsParams, lark_literal
from quire.grammar.backend import embedded_schema
from quire.server.api.tools import ToolUse
from quire.server.http.errors import bad_request
from quire.text.reasoning import ReasoningFormat, ReasoningParser, Thought
from quire.text.tools import CallArguments, CallBegin, Text, ToolParser

Event = Thought | Text | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class Marks:
    """How a model marks its thoughts, and which tokens the marks are, where they are."""

    form: ReasoningFormat
    begin_token_id: int | None = None
    end_token_id: int | None = None
    is_special: bool = False
    """Whether the marks are special tokens, which must not be hidden from the parser."""


@dataclass(frozen=True, slots=True)
class Reading:
    """For all answers to one request."""

    marks: Marks | None = None
    """None where nothing is read as a thought."""
    is_inside: bool = False
    """Whether the answer begins among thoughts."""
    tools: ToolUse | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all of an answer is text."""
        return self.marks is None and self.tools is None

    @property
    def is_call(self) -> bool:
        """Whether all answers are calls, so that no form for text has anything to say."""
        return self.tools is not None and self.tools.is_enforced

    def reader(self) -> AnswerReader:
        """For one answer."""
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
            grammar = _either(_json_grammar(form.wire), grammar.text)
        if self.marks is not None and form is not None and not self.is_call:
            text = _json_grammar(form.wire) if grammar is None else grammar.text
            grammar = _behind_thoughts(text, self.marks, self.is_inside)
        elif self.marks is not None and self.is_call and grammar is not None:
            grammar = _behind_thoughts(grammar.text, self.marks, self.is_inside)
        if grammar is not None:
            given["structured_outputs"] = StructuredOutputsParams.of_grammar(grammar)
        if (self.tools is not None and self.tools.shows_special) or (
            self.marks is not None and self.marks.is_special
        ):
            given["skip_special_tokens"] = False
        return given


def is_json(form: StructuredOutputsParams) -> bool:
    """Return whether a form is JSON, before which there may be thoughts and
    beside which there may be calls."""
    return form.wire.kind in ("json", "json_compact")


def _either(form: str, calls: str) -> Grammar:
    """Return two grammars of ours, each of which ends with the rule `start`, as alternatives."""
    (one, _, first), (other, _, second) = form.rpartition("start: "), calls.rpartition("start: ")
    return Grammar("lark", f"{one}{other}answer: {first} | {second}\nstart: answer")


def _json_grammar(wire: Grammar) -> str:
    schema = embedded_schema(wire.text, is_compact=wire.kind == "json_compact")
    return f"form: %json {schema}\nstart: form"


def _behind_thoughts(text: str, marks: Marks, is_inside: bool) -> Grammar:
    """Return a grammar of ours, which ends with the rule `start`, with room for thoughts before it,
    which a prompt that has begun them demands.
    """
    rules, _, start = text.rpartition("start: ")
    end = lark_literal(marks.form.end)
    lines = [f"thoughts[suffix={end}]: /(?s:.*)/"]
    if marks.is_special:
        lines = [f"thoughts: THOUGHT? <[{marks.end_token_id}]>", "THOUGHT: /(?s:.+)/"]
    begin = f"<[{marks.begin_token_id}]>" if marks.is_special else lark_literal(marks.form.begin)
    behind = f"thoughts BREAKS? {start}"
    lines += [
        "BREAKS: /\\n{1,4}/",
        f"start: {behind}" if is_inside else f"start: {start} | {begin} {behind}",
    ]
    return Grammar("lark", rules + "\n".join(lines))


class AnswerReader:
    """One answer, piece by piece."""

    def __init__(self, reading: Reading) -> None:
        marks, tools = reading.marks, reading.tools
        self._thoughts = (
            None if marks is None else ReasoningParser(marks.form, is_inside=reading.is_inside)
        )
        self._calls = None if tools is None else ToolParser(tools.form)
        self._end_token_id = None if marks is None else marks.end_token_id
        self._is_counting = self._end_token_id is not None
        self._num_counted = 0

    @property
    def num_calls(self) -> int:
        """Calls that are complete."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def num_thought_tokens(self) -> int:
        """Tokens up to the mark that ends the thoughts;
        0 for a model that writes the mark with several."""
        return self._num_counted if self._thoughts is not None and self._thoughts.has_begun else 0

    def feed(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> list[Event]:
        """Return what a piece of the answer brings."""
        if self._is_counting:
            self._count(token_ids)
        if self._thoughts is None:
            return self._read(text, is_last=is_last)
        found = self._thoughts.feed(text) + (self._thoughts.flush() if is_last else [])
        events: list[Event] = [each for each in found if isinstance(each, Thought)]
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
